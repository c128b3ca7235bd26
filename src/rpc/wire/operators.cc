// SPDX-License-Identifier: BSD-3-Clause
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <sstream>
#include <string_view>

#include "core/group/errors.h"
#include "muster/rpc_function.h"
#include "rpc/functions.h"

namespace muster::rpc {
namespace {

/// The operators of namespace aten that another worker may call without being allowed to: they
/// compute tensors from their arguments and check them. Each name stands for its in-place form too.
/// Excluded are
///  - operators that open files or shared memory, or that change the state of the process;
///  - operators that expose memory they were not given: uninitialised tensors, storages, strides
///    over other elements, unchecked formats and modes (grid_sampler);
///  - kernels that trust their caller: backward passes, kernels of one library, ctc_loss,
///    embedding_bag with its offsets, recurrent layers with their states, solvers with their
///    pivots, native_group_norm with its sizes, unflatten with its sizes, upsample with its scales,
///    eigenvalues of infinite elements;
///  - losses that return memory which they have not written, where one argument is empty:
///    binary_cross_entropy (its form with logits is served), multilabel_margin_loss;
///  - operators that may not end: powers and polynomials of any degree, `random` with any range,
///    zeta and polygamma, which count up from a negative argument to 9 in steps of 1.
/// `operators.cc` checks enumerators such as dtypes and reductions, passes no tensor whose elements
/// overlap, and ignores overloads without a tensor (TorchScript's arithmetic of numbers, texts and
/// lists). `served_operators_test.cc` calls them all with random arguments. A call may still crash
/// the callee: torch traps when it divides a tensor's smallest integer by -1. Sorted.
// clang-format off
constexpr std::array kComputing = std::to_array<std::string_view>({
    "abs", "absolute", "acos", "acosh", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d",
    "add", "addbmm", "addcdiv", "addcmul", "addmm", "addmv", "addr", "adjoint",
    "affine_grid_generator", "alias", "alias_copy", "all", "allclose", "alpha_dropout", "amax",
    "amin", "aminmax", "angle", "any", "arange", "arccos", "arccosh", "arcsin", "arcsinh",
    "arctan", "arctan2", "arctanh", "argmax", "argmin", "argsort", "argwhere", "asin", "asinh",
    "atan", "atan2", "atanh", "atleast_1d", "atleast_2d", "atleast_3d", "avg_pool1d",
    "avg_pool2d", "avg_pool3d", "baddbmm", "bartlett_window", "batch_norm", "bernoulli",
    "bilinear", "binary_cross_entropy_with_logits", "bincount",
    "bitwise_and", "bitwise_left_shift", "bitwise_not", "bitwise_or",
    "bitwise_right_shift", "bitwise_xor", "blackman_window", "block_diag", "bmm",
    "broadcast_tensors", "broadcast_to", "bucketize", "cartesian_prod", "cat", "cauchy",
    "cdist", "ceil", "celu", "chain_matmul", "chalf", "channel_shuffle", "cholesky_inverse",
    "cholesky_solve", "chunk", "clamp", "clamp_max", "clamp_min", "clip", "clone", "col2im",
    "column_stack", "combinations", "complex", "concat", "concatenate", "conj", "conj_physical",
    "constant_pad_nd", "contiguous", "conv1d", "conv2d", "conv3d", "conv_tbc",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution", "copy",
    "copysign", "corrcoef", "cos", "cosh", "cosine_embedding_loss", "cosine_similarity",
    "count_nonzero", "cov", "cross", "cross_entropy_loss", "cummax", "cummin", "cumprod",
    "cumsum", "cumulative_trapezoid", "deg2rad", "det", "detach", "detach_copy", "diag",
    "diag_embed", "diagflat", "diagonal", "diagonal_copy", "diagonal_scatter", "diff",
    "digamma", "dim", "dist", "div", "divide", "dot", "dropout", "dsplit", "dstack", "einsum",
    "elu", "embedding", "eq", "equal", "erf", "erfc", "erfinv", "exp", "exp2", "expand",
    "expand_as", "expand_copy", "expm1", "exponential", "eye", "feature_alpha_dropout",
    "feature_dropout", "fft_fft", "fft_fft2", "fft_fftfreq", "fft_fftn", "fft_fftshift",
    "fft_hfft", "fft_hfft2", "fft_hfftn", "fft_ifft", "fft_ifft2", "fft_ifftn", "fft_ifftshift",
    "fft_ihfft", "fft_ihfft2", "fft_ihfftn", "fft_irfft", "fft_irfft2", "fft_irfftn",
    "fft_rfft", "fft_rfft2", "fft_rfftfreq", "fft_rfftn", "fill", "fill_diagonal", "fix",
    "flatten", "flatten_dense_tensors", "flip", "fliplr", "flipud", "float_power", "floor",
    "floor_divide", "fmax", "fmin", "fmod", "frac", "frexp", "frobenius_norm", "full",
    "full_like", "gather", "gcd", "ge", "gelu", "geometric", "geqrf", "ger", "get_device",
    "glu", "gradient", "greater", "greater_equal", "group_norm", "gru_cell", "gt",
    "hamming_window", "hann_window", "hardshrink", "hardsigmoid", "hardswish", "hardtanh",
    "heaviside", "hinge_embedding_loss", "histc", "histogram", "histogramdd", "hsplit",
    "hstack", "huber_loss", "hypot", "i0", "igamma", "igammac", "im2col", "imag", "index",
    "index_add", "index_copy", "index_fill", "index_put", "index_reduce", "index_select",
    "inner", "instance_norm", "inverse", "is_complex", "is_conj", "is_contiguous",
    "is_floating_point", "is_neg", "is_nonzero", "is_same_size", "is_signed", "isclose",
    "isfinite", "isin", "isinf", "isnan", "isneginf", "isposinf", "isreal", "istft", "item",
    "kaiser_window", "kl_div", "kron", "kthvalue", "l1_loss", "layer_norm", "lcm", "ldexp",
    "le", "leaky_relu", "lerp", "less", "less_equal", "lgamma", "linalg_cholesky",
    "linalg_cholesky_ex", "linalg_cond", "linalg_cross", "linalg_det", "linalg_diagonal",
    "linalg_eigh", "linalg_eigvalsh", "linalg_householder_product", "linalg_inv",
    "linalg_inv_ex", "linalg_ldl_factor", "linalg_ldl_factor_ex", "linalg_lstsq", "linalg_lu",
    "linalg_lu_factor", "linalg_lu_factor_ex", "linalg_matmul", "linalg_matrix_exp",
    "linalg_matrix_norm", "linalg_matrix_rank", "linalg_matrix_sqrth", "linalg_multi_dot",
    "linalg_norm", "linalg_pinv", "linalg_polar", "linalg_qr", "linalg_slogdet", "linalg_solve",
    "linalg_solve_ex", "linalg_solve_triangular", "linalg_svd", "linalg_svdvals",
    "linalg_tensorinv", "linalg_tensorsolve", "linalg_vander", "linalg_vecdot",
    "linalg_vector_norm", "linear", "linspace", "log", "log10", "log1p", "log2", "log_normal",
    "log_sigmoid", "log_softmax", "logaddexp", "logaddexp2", "logcumsumexp", "logdet",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logit", "logspace", "logsumexp",
    "lstm_cell", "lt", "lu_unpack", "mH", "mT", "margin_ranking_loss", "masked_fill",
    "masked_scatter", "masked_select", "matmul", "matrix_H", "matrix_exp", "max", "max_pool1d",
    "max_pool1d_with_indices", "max_pool2d", "max_pool3d", "maximum", "mean", "median",
    "meshgrid", "min", "minimum", "mish", "mm", "mode", "moveaxis", "movedim", "mse_loss",
    "msort", "mul", "multi_margin_loss", "multinomial", "multiply",
    "mv", "mvlgamma", "nan_to_num", "nanmean", "nanmedian", "nanquantile", "nansum", "narrow",
    "narrow_copy", "native_layer_norm", "ne", "neg", "negative", "new_full", "new_ones",
    "new_zeros", "nextafter", "nll_loss", "nll_loss2d", "nll_loss_nd", "nonzero",
    "nonzero_numpy", "nonzero_static", "norm", "normal", "not_equal", "nuclear_norm", "numel",
    "numpy_T", "one_hot", "ones", "ones_like", "orgqr", "ormqr", "outer", "pad", "pad_sequence",
    "pairwise_distance", "pdist", "permute", "permute_copy", "pinverse", "pixel_shuffle",
    "pixel_unshuffle", "poisson", "poisson_nll_loss", "polar", "positive", "pow",
    "prelu", "prod", "put", "quantile", "rad2deg", "rand", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "randperm", "range", "ravel", "real", "reciprocal",
    "reflection_pad1d", "reflection_pad2d", "reflection_pad3d", "relu", "relu6", "remainder",
    "renorm", "repeat", "repeat_interleave", "replication_pad1d", "replication_pad2d",
    "replication_pad3d", "requires_grad", "reshape", "reshape_as", "resolve_conj",
    "resolve_neg", "rms_norm", "rnn_relu_cell", "rnn_tanh_cell", "roll", "rot90", "round",
    "row_stack", "rrelu", "rsqrt", "rsub", "scalar_tensor", "scaled_dot_product_attention",
    "scatter", "scatter_add", "scatter_reduce", "searchsorted", "select", "select_copy",
    "select_scatter", "selu", "sgn", "sigmoid", "sign", "signbit", "silu", "sin", "sinc",
    "sinh", "slice", "slice_copy", "slice_scatter", "slogdet", "smooth_l1_loss",
    "soft_margin_loss", "softmax", "softplus", "softshrink", "sort", "special_airy_ai",
    "special_bessel_j0", "special_bessel_j1", "special_bessel_y0", "special_bessel_y1",
    "special_digamma", "special_entr", "special_erf", "special_erfc", "special_erfcx",
    "special_erfinv", "special_exp2", "special_expit", "special_expm1", "special_gammainc",
    "special_gammaincc", "special_gammaln", "special_i0", "special_i0e", "special_i1",
    "special_i1e", "special_log1p", "special_log_ndtr", "special_log_softmax", "special_logit",
    "special_logsumexp", "special_modified_bessel_i0", "special_modified_bessel_i1",
    "special_modified_bessel_k0", "special_modified_bessel_k1", "special_multigammaln",
    "special_ndtr", "special_ndtri", "special_psi", "special_round",
    "special_scaled_modified_bessel_k0", "special_scaled_modified_bessel_k1", "special_sinc",
    "special_softmax", "special_spherical_bessel_j0", "special_xlog1py", "special_xlogy",
    "split", "split_copy", "split_with_sizes", "split_with_sizes_copy", "sqrt",
    "square", "squeeze", "squeeze_copy", "stack", "std", "std_mean", "stft", "sub", "subtract",
    "sum", "sum_to_size", "svd", "swapaxes", "swapdims", "t", "t_copy", "take",
    "take_along_dim", "tan", "tanh", "tensor_split", "tensordot", "threshold", "tile", "to",
    "to_dense", "topk", "trace", "transpose", "transpose_copy", "trapezoid", "trapz",
    "triangular_solve", "tril", "tril_indices", "triplet_margin_loss", "triu", "triu_indices",
    "true_divide", "trunc", "type_as", "unbind", "unbind_copy",
    "unflatten_dense_tensors", "unfold", "unfold_copy", "uniform", "unique_consecutive",
    "unique_dim", "unique_dim_consecutive", "unsqueeze", "unsqueeze_copy", "vander", "var",
    "var_mean", "vdot", "view", "view_as", "view_as_complex", "view_as_complex_copy",
    "view_as_real", "view_as_real_copy", "view_copy", "vsplit", "vstack", "where", "xlogy",
    "zero", "zeros", "zeros_like",
});
// clang-format on
static_assert(std::ranges::is_sorted(kComputing));

constexpr std::string_view kNamespace = "aten::";

}  // namespace

std::span<const std::string_view> computing_operators() { return kComputing; }

bool is_computing_operator(std::string_view name) {
  if (!name.starts_with(kNamespace)) return false;
  name.remove_prefix(kNamespace.size());
  if (name.ends_with('_')) name.remove_suffix(1);
  return std::ranges::binary_search(kComputing, name);
}

// torch's operators by name.

namespace {

using detail::Tag;
using Overloads = std::vector<c10::OperatorHandle>;

/// Whether it computes tensors. The others are TorchScript's: numbers, texts and lists.
bool has_tensors(const c10::FunctionSchema& schema) {
  const auto is_tensor = [](const c10::Argument& each) {
    return each.type()->str().find("Tensor") != std::string::npos;
  };
  return std::ranges::any_of(schema.arguments(), is_tensor) ||
         std::ranges::any_of(schema.returns(), is_tensor);
}

/// All overloads of an operator, asked of torch once; of those that compute tensors, no others.
class Operators {
 public:
  const Overloads* find(std::string_view name) {
    {
      const std::shared_lock lock(mutex_);
      if (const auto known = known_.find(name); known != known_.end())
        return known->second.empty() ? nullptr : &known->second;
    }
    const std::unique_lock lock(mutex_);
    if (names_.empty()) {
      for (auto& op : c10::Dispatcher::singleton().getAllOpNames()) names_[op.name].push_back(op);
    }
    Overloads overloads;
    if (const auto found = names_.find(name); found != names_.end()) {
      // The overload without a name is the default one and is tried first.
      for (const bool plain : {true, false}) {
        for (const auto& op : found->second) {
          if (op.overload_name.empty() != plain) continue;
          auto handle = c10::Dispatcher::singleton().findSchema(op);
          if (handle && (!is_computing_operator(name) || has_tensors(handle->schema())))
            overloads.push_back(*handle);
        }
      }
    } else {
      return nullptr;  // not cached: peers may send any text
    }
    // Another thread may have added it since the search above, and may be reading the list.
    const auto& kept = known_.try_emplace(std::string(name), std::move(overloads)).first->second;
    return kept.empty() ? nullptr : &kept;
  }
  void forget_names() {
    const std::unique_lock lock(mutex_);
    names_.clear();
  }
  void allow(const std::string& name) {
    const std::unique_lock lock(mutex_);
    allowed_.insert(name);
  }
  bool allows(std::string_view name) {
    if (is_computing_operator(name)) return true;
    const std::shared_lock lock(mutex_);
    return allowed_.contains(name);
  }

 private:
  std::shared_mutex mutex_;
  std::map<std::string, std::vector<c10::OperatorName>, std::less<>> names_;
  std::map<std::string, Overloads, std::less<>> known_;  // never shrinks: references stay good
  std::set<std::string, std::less<>> allowed_;           // besides those that compute
};
Operators& operators() {
  static auto* all = new Operators;
  return *all;
}

template <class T>
bool read_as(std::uint64_t hash, ValueInput& archive, c10::IValue& value) {
  if (hash != detail::type_hash<T>()) return false;
  T object{};
  archive(object);
  value = c10::IValue(std::move(object));
  return true;
}

c10::IValue read_value(ValueInput& archive, std::string_view name) {
  Tag tag{};
  archive.get(&tag, 1);
  switch (tag) {
    case Tag::boolean: return detail::get_number<std::uint8_t>(archive) != 0;
    case Tag::i8: return static_cast<std::int64_t>(detail::get_number<std::int8_t>(archive));
    case Tag::u8: return static_cast<std::int64_t>(detail::get_number<std::uint8_t>(archive));
    case Tag::i16: return static_cast<std::int64_t>(detail::get_number<std::int16_t>(archive));
    case Tag::u16: return static_cast<std::int64_t>(detail::get_number<std::uint16_t>(archive));
    case Tag::i32: return static_cast<std::int64_t>(detail::get_number<std::int32_t>(archive));
    case Tag::u32: return static_cast<std::int64_t>(detail::get_number<std::uint32_t>(archive));
    case Tag::i64: return detail::get_number<std::int64_t>(archive);
    case Tag::u64: return static_cast<std::int64_t>(detail::get_number<std::uint64_t>(archive));
    case Tag::f32: return static_cast<double>(detail::get_number<float>(archive));
    case Tag::f64: return detail::get_number<double>(archive);
    case Tag::object: break;
  }
  const auto hash = detail::get_number<std::uint64_t>(archive);
  c10::IValue value;
  if (read_as<at::Tensor>(hash, archive, value) || read_as<std::string>(hash, archive, value) ||
      read_as<std::vector<std::int64_t>>(hash, archive, value) ||
      read_as<std::vector<double>>(hash, archive, value) ||
      read_as<std::vector<at::Tensor>>(hash, archive, value))
    return value;
  throw ValueError("'" + std::string(name) +
                   "' is one of torch's operators: its arguments are tensors, numbers, text and "
                   "vectors of int64_t, double or " +
                   "at::Tensor; " + detail::known_type(hash) + " was given");
}

/// The tensor itself where its elements lie side by side, each in a place of its own; else a copy
/// that is so, through which gradients pass.
at::Tensor dense(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.is_non_overlapping_and_dense())
    return tensor;
  return tensor.clone(at::MemoryFormat::Contiguous);
}

c10::IValue dense(c10::IValue value) {
  if (value.isTensor()) return dense(value.toTensor());
  if (!value.isTensorList()) return value;
  std::vector<at::Tensor> tensors = value.toTensorVector();
  for (at::Tensor& tensor : tensors) tensor = dense(tensor);
  return tensors;
}

bool fits(const c10::IValue& value, const c10::Argument& argument) {
  const auto& type = argument.type();
  if (value.isTensor())
    return type->kind() == c10::TypeKind::TensorType || type->kind() == c10::TypeKind::OptionalType
               ? value.type()->isSubtypeOf(*type)
               : false;
  return value.type()->isSubtypeOf(*type);
}

/// Arguments whose numbers must be below a bound, by their name: some overloads have plain numbers
/// for a dtype, a layout or a memory format, which torch looks up without checking. The layout must
/// be strided: tensors of other layouts do not travel, and their kernels fail on memory that they
/// do not have. Kernels take any number for a reduction (none, mean, sum) and then store nothing,
/// and make any number of sections.
constexpr std::pair<std::string_view, std::int64_t> kBounds[] = {
    {"dtype", static_cast<std::int64_t>(c10::ScalarType::NumOptions)},
    {"layout", static_cast<std::int64_t>(c10::Layout::Strided) + 1},
    {"memory_format", static_cast<std::int64_t>(c10::MemoryFormat::NumOptions)},
    {"reduction", 3},
    {"sections", 1 << 16}};

std::string_view kind_of(const c10::Argument& argument) {
  c10::TypePtr type = argument.real_type();
  if (const auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: return "dtype";
    case c10::TypeKind::LayoutType: return "layout";
    case c10::TypeKind::MemoryFormatType: return "memory_format";
    default: return argument.name();
  }
}

/// Whether a number is within its argument's bound.
bool is_in_bounds(const c10::IValue& value, const c10::Argument& argument) {
  if (!value.isInt()) return true;
  const std::string_view kind = kind_of(argument);
  const auto* const row =
      std::ranges::find(kBounds, kind, [](const auto& each) { return each.first; });
  if (row == std::end(kBounds)) return true;
  if (kind == "dtype" && value.toInt() == static_cast<std::int64_t>(c10::ScalarType::Undefined))
    return false;
  return value.toInt() >= 0 && value.toInt() < row->second;
}

/// Fills the stack for this overload: the given arguments, then defaults. False if they do not
/// match.
bool complete(const c10::FunctionSchema& schema, const std::vector<c10::IValue>& given,
              torch::jit::Stack& stack) {
  const auto& arguments = schema.arguments();
  if (given.size() > arguments.size()) return false;
  for (std::size_t i = 0; i < given.size(); ++i) {
    auto value = given[i];
    // As elsewhere in torch, an integer is accepted for a float.
    if (value.isInt() && arguments[i].type()->kind() == c10::TypeKind::FloatType)
      value = static_cast<double>(value.toInt());
    if (!fits(value, arguments[i]) || !is_in_bounds(value, arguments[i])) return false;
    stack.push_back(std::move(value));
  }
  for (std::size_t i = given.size(); i < arguments.size(); ++i) {
    if (!arguments[i].default_value()) return false;
    stack.push_back(*arguments[i].default_value());
  }
  return true;
}

void put_values(Value& value, ValueDelivery& delivery, const torch::jit::Stack& results,
                std::string_view name) {
  if (results.empty()) return;
  if (results.size() > 1) {
    std::vector<at::Tensor> tensors;
    for (const auto& result : results) {
      if (!result.isTensor())
        throw DistError("'" + std::string(name) +
                            "' returns several values that are not all tensors: they do not travel",
                        Code::unsupported);
      tensors.push_back(result.toTensor());
    }
    return detail::put_result(value, delivery, tensors);
  }
  const auto& result = results.front();
  if (result.isTensor()) return detail::put_result(value, delivery, result.toTensor());
  if (result.isBool()) return detail::put_result(value, delivery, result.toBool());
  if (result.isInt()) return detail::put_result(value, delivery, result.toInt());
  if (result.isDouble()) return detail::put_result(value, delivery, result.toDouble());
  if (result.isString())
    return detail::put_result(value, delivery, std::string(result.toStringRef()));
  if (result.isTensorList()) return detail::put_result(value, delivery, result.toTensorVector());
  if (result.isNone()) return;
  throw DistError(
      "'" + std::string(name) + "' returns " + result.tagKind() + ", which does not travel",
      Code::unsupported);
}

}  // namespace

bool is_operator(std::string_view name) {
  return name.find("::") != std::string_view::npos && operators().find(name) != nullptr;
}

bool is_allowed_operator(std::string_view name) { return operators().allows(name); }

void allow_operator(const std::string& name) {
  operators().forget_names();  // libraries loaded since may have added some
  if (!is_operator(name)) {
    group::invalid("allow_operator: torch has no operator '" + name +
                   "'; give its namespace and name without an overload (\"aten::add\"), and load "
                   "the library that defines it first");
  }
  operators().allow(name);
}

torch::jit::Stack call_operator(std::string_view name, std::vector<c10::IValue> given) {
  for (auto& value : given) value = dense(std::move(value));
  const Overloads& overloads = *operators().find(name);
  for (const auto& overload : overloads) {
    torch::jit::Stack stack;
    if (!complete(overload.schema(), given, stack)) continue;
    overload.callBoxed(stack);
    return stack;
  }
  std::string wanted;
  for (const auto& overload : overloads) {
    std::ostringstream text;
    text << overload.schema();
    wanted += "\n  " + text.str();
  }
  group::invalid("no overload of '" + std::string(name) + "' takes the " +
                 std::to_string(given.size()) + " arguments that were given; there are" + wanted);
}

void serve_operator(Request& request) {
  const auto& name = request.message.name;
  if (!is_allowed_operator(name)) {
    throw DistError("'" + name +
                        "' is not among the operators that other workers may call by name: those "
                        "compute tensors and touch nothing else. Call allow_operator(\"" +
                        name + "\") on this worker, or register a function that calls it",
                    Code::refused);
  }
  ValueInput archive(request.message.value, *request.delivery);
  std::uint8_t count = 0;
  archive.get(&count, 1);
  std::vector<c10::IValue> given;
  for (int i = 0; i < count; ++i) given.push_back(read_value(archive, name));
  if (archive.left() > 0) detail::too_long(name);
  request.message.value.tensors.clear();
  const torch::jit::Stack results = call_operator(name, std::move(given));
  if (request.responder)
    request.responder->reply(
        [&](Value& value, ValueDelivery& delivery) { put_values(value, delivery, results, name); });
}

}  // namespace muster::rpc
