#include <algorithm>
#include <array>
#include <string_view>

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

}  // namespace muster::rpc
