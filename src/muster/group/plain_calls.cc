#include "muster/group/plain_calls.h"

#include <algorithm>
#include <string>

#include "muster/group/backends/spare_args.h"
#include "muster/group/plain_tensor.h"
#include "muster/group/scalar_type.h"
#include "muster/group/world.h"

namespace muster::group::plain {
namespace {

bool apart(ConstBytes a, ConstBytes b) {
  return a.empty() || b.empty() || a.data() + a.size() <= b.data() ||
         b.data() + b.size() <= a.data();
}

/// What a call knows of the slices it gives and gets by the way they were made: that they are right
/// in number, in length and in being apart, or that they are if they are apart.
enum class Slices : std::uint8_t { right, right_if_apart };

/// Beyond that the engine's check, which sorts them, is quicker than a look at every two.
constexpr std::size_t kMostPairs = 40;

void changed(const at::Tensor& tensor) { mark_written(tensor); }
void changed(const TensorList& tensors) {
  for (const auto& tensor : tensors) changed(tensor);
}

/// What a function is called.
struct Name {
  std::string_view text;
  trace::Name recorded;
  constexpr Name(const char* name) : text(name), recorded(name) {}
};

/// One call on its way. `ok` becomes false at the first thing that is out of the ordinary.
class Call {
 public:
  Call(Op op, const Name& name, const Group& given, const std::optional<Duration>& timeout,
       bool async_op)
      : held_(given ? WorldScope::Hold() : WorldScope::current()->hold()),
        group_(given ? given.get() : held_.get()) {
    ok = !async_op && group_ != nullptr && group_->takes_plain();
    if (!ok) return;
    call_.name = name.text;
    call_.recorded = &name.recorded;
    call_.timeout = &timeout;
    args_->op = op;
  }

  std::size_t size() const { return static_cast<std::size_t>(group_->size()); }
  std::size_t rank() const { return static_cast<std::size_t>(group_->rank()); }
  bool at_root() const { return args_->root == group_->rank(); }

  void root(std::optional<int> global, std::optional<int> local, std::optional<int> fallback = {}) {
    if (!ok) return;
    if (!global && !local) global = fallback;
    ok = global.has_value() != local.has_value();
    if (!ok) return;
    const auto& ranks = group_->ranks();
    const auto place =
        local ? *local
              : static_cast<int>(std::find(ranks.begin(), ranks.end(), *global) - ranks.begin());
    ok = place >= 0 && place < group_->size();
    args_->root = place;
    if (ok) call_.peer = group_->first_rank_of(place);
  }

  void message(std::optional<int> global, std::optional<int> local, std::int64_t tag) {
    root(global, local);
    ok = ok && args_->root != group_->rank() && tag >= 0;
    args_->tag = static_cast<std::uint64_t>(tag);
    call_.tag = tag;
    call_.message = true;
  }
  /// Its rank of the default group.
  int other_end() const { return group_->ranks()[static_cast<std::size_t>(args_->root)]; }

  /// The first tensor gives the dtype; the others must agree.
  void take(const at::Tensor& tensor) {
    ok = ok && is_plain(tensor);
    if (!ok) return;
    if (like_ == at::ScalarType::Undefined) {
      like_ = tensor.scalar_type();
      args_->dtype = to_dtype(like_);
      call_.dtype = static_cast<std::uint8_t>(args_->dtype);
      call_.shape = {tensor.sizes().data(), tensor.sizes().size()};
    } else {
      ok = tensor.scalar_type() == like_;
    }
  }
  void reduces(const ReduceOp& op) {
    if (!ok) return;
    args_->reduce = op.engine();
    args_->factor = op.factor();
    const bool sums = args_->reduce == collective::Reduce::sum ||
                      args_->reduce == collective::Reduce::avg;  // of whatever can be reduced
    ok = is_reducible(args_->dtype) &&
         (sums || collective::reduce_supports(args_->reduce, args_->dtype, nullptr));
  }

  void give(ConstBytes bytes) { args_->inputs.push_back(bytes); }
  void get(MutableBytes bytes) { args_->outputs.push_back(bytes); }
  /// Every member's part of `whole`, of `part` bytes.
  void give_parts(ConstBytes whole, std::size_t part) {
    for (std::size_t member = 0; member < size(); ++member)
      give(whole.subspan(member * part, part));
  }
  void get_parts(MutableBytes whole, std::size_t part) {
    for (std::size_t member = 0; member < size(); ++member) get(whole.subspan(member * part, part));
  }
  void give_all(const TensorList& tensors) {
    for (const auto& tensor : tensors) give(plain_bytes(tensor));
  }
  void get_all(const TensorList& tensors) {
    for (const auto& tensor : tensors) get(plain_mutable_bytes(tensor));
  }
  /// A list with a tensor for each member.
  void take_all(const TensorList& tensors) {
    ok = ok && tensors.size() == size();
    for (std::size_t i = 0; ok && i < tensors.size(); ++i) take(tensors[i]);
  }

  bool run(Slices slices) {
    const auto& inputs = args_->inputs;
    const auto& outputs = args_->outputs;
    const std::size_t first = !inputs.empty()    ? inputs.front().size()
                              : !outputs.empty() ? outputs.front().size()
                                                 : 0;
    std::uint64_t in = 0, out = 0;
    std::size_t unlike = 0;
    for (const auto& slice : inputs) in += slice.size(), unlike |= slice.size() ^ first;
    for (const auto& slice : outputs) out += slice.size(), unlike |= slice.size() ^ first;
    args_->each = unlike == 0 ? first : collective::Args::kUnsaid;
    call_.bytes = std::max(in, out);
    call_.valid = slices == Slices::right || few_and_apart();
    return group_->run_plain(*args_, call_);
  }
  template <class Written>
  bool run(Slices slices, const Written& written) {
    if (!run(slices)) return false;
    changed(written);
    return true;
  }

  bool ok = false;

 private:
  /// Whether no output overlaps another or an input, found out by comparing every two.
  bool few_and_apart() const {
    const auto& in = args_->inputs;
    const auto& out = args_->outputs;
    if (out.size() * in.size() + out.size() * (out.size() - 1) / 2 > kMostPairs) return false;
    for (std::size_t i = 0; i < out.size(); ++i) {
      for (std::size_t j = 0; j < i; ++j) {
        if (!apart(out[i], out[j])) return false;
      }
      for (const ConstBytes slice : in) {
        if (!apart(out[i], slice)) return false;
      }
    }
    return true;
  }

  const WorldScope::Hold held_;
  ProcessGroup* const group_;
  LentArgs args_;
  PlainCall call_;
  at::ScalarType like_ = at::ScalarType::Undefined;
};

bool equal_sizes(const TensorList& tensors, std::int64_t elements) {
  return std::all_of(tensors.begin(), tensors.end(),
                     [&](const at::Tensor& tensor) { return tensor.numel() == elements; });
}

}  // namespace

bool broadcast(const at::Tensor& tensor, const BroadcastOptions& options) {
  static constexpr Name kName = "broadcast";
  Call call(Op::broadcast, kName, options.group, options.timeout, options.async_op);
  call.root(options.src, options.group_src);
  call.take(tensor);
  if (!call.ok) return false;
  call.get(plain_mutable_bytes(tensor));
  return call.run(Slices::right);
}

bool all_reduce(const at::Tensor& tensor, const AllReduceOptions& options) {
  static constexpr Name kName = "all_reduce";
  Call call(Op::all_reduce, kName, options.group, options.timeout, options.async_op);
  call.take(tensor);
  call.reduces(options.op);
  if (!call.ok) return false;
  const auto bytes = plain_mutable_bytes(tensor);
  call.give(bytes);
  call.get(bytes);
  return call.run(Slices::right);
}

bool reduce(const at::Tensor& tensor, const ReduceOptions& options) {
  static constexpr Name kName = "reduce";
  Call call(Op::reduce, kName, options.group, options.timeout, options.async_op);
  call.root(options.dst, options.group_dst);
  call.take(tensor);
  call.reduces(options.op);
  if (!call.ok) return false;
  call.give(plain_bytes(tensor));
  if (call.at_root()) call.get(plain_mutable_bytes(tensor));
  return call.run(Slices::right);
}

bool all_gather(const TensorList& tensor_list, const at::Tensor& tensor,
                const CollectiveOptions& options) {
  static constexpr Name kName = "all_gather";
  Call call(Op::all_gather, kName, options.group, options.timeout, options.async_op);
  call.take(tensor);
  call.take_all(tensor_list);
  if (!call.ok || tensor_list[call.rank()].numel() != tensor.numel()) return false;
  call.give(plain_bytes(tensor));
  call.get_all(tensor_list);
  return call.run(Slices::right_if_apart, tensor_list);
}

bool all_gather_into_tensor(const at::Tensor& output, const at::Tensor& input,
                            const CollectiveOptions& options) {
  static constexpr Name kName = "all_gather_into_tensor";
  Call call(Op::all_gather, kName, options.group, options.timeout, options.async_op);
  call.take(input);
  call.take(output);
  if (!call.ok || output.nbytes() != call.size() * input.nbytes()) return false;
  const auto from = plain_bytes(input);
  const auto to = plain_mutable_bytes(output);
  if (!apart(from, to)) return false;
  call.give(from);
  call.get_parts(to, from.size());
  return call.run(Slices::right, output);
}

bool gather(const at::Tensor& tensor, const GatherOptions& options) {
  static constexpr Name kName = "gather";
  Call call(Op::gather, kName, options.group, options.timeout, options.async_op);
  call.root(options.dst, options.group_dst, 0);
  call.take(tensor);
  if (!call.ok) return false;
  if (!call.at_root()) {
    if (!options.gather_list.empty()) return false;
    call.give(plain_bytes(tensor));
    return call.run(Slices::right);
  }
  call.take_all(options.gather_list);
  if (!call.ok || !equal_sizes(options.gather_list, tensor.numel())) return false;
  call.give(plain_bytes(tensor));
  call.get_all(options.gather_list);
  return call.run(Slices::right_if_apart, options.gather_list);
}

bool scatter(const at::Tensor& tensor, const ScatterOptions& options) {
  static constexpr Name kName = "scatter";
  Call call(Op::scatter, kName, options.group, options.timeout, options.async_op);
  call.root(options.src, options.group_src, 0);
  call.take(tensor);
  if (!call.ok) return false;
  const bool root = call.at_root();
  if (root) call.take_all(options.scatter_list);
  if (!call.ok ||
      (root ? !equal_sizes(options.scatter_list, tensor.numel()) : !options.scatter_list.empty()))
    return false;
  call.give_all(options.scatter_list);
  call.get(plain_mutable_bytes(tensor));
  return call.run(root ? Slices::right_if_apart : Slices::right);
}

bool reduce_scatter(const at::Tensor& output, const TensorList& input_list,
                    const ReduceScatterOptions& options) {
  static constexpr Name kName = "reduce_scatter";
  Call call(Op::reduce_scatter, kName, options.group, options.timeout, options.async_op);
  call.take_all(input_list);
  call.take(output);
  call.reduces(options.op);
  if (!call.ok || input_list[call.rank()].numel() != output.numel()) return false;
  call.give_all(input_list);
  call.get(plain_mutable_bytes(output));
  return call.run(Slices::right_if_apart, output);
}

bool reduce_scatter_tensor(const at::Tensor& output, const at::Tensor& input,
                           const ReduceScatterOptions& options) {
  static constexpr Name kName = "reduce_scatter_tensor";
  Call call(Op::reduce_scatter, kName, options.group, options.timeout, options.async_op);
  call.take(output);
  call.take(input);
  call.reduces(options.op);
  if (!call.ok || input.nbytes() != call.size() * output.nbytes()) return false;
  const auto from = plain_bytes(input);
  const auto to = plain_mutable_bytes(output);
  if (!apart(from, to)) return false;
  call.give_parts(from, to.size());
  call.get(to);
  return call.run(Slices::right, output);
}

bool all_to_all_single(const at::Tensor& output, const at::Tensor& input,
                       const AllToAllSingleOptions& options) {
  static constexpr Name kName = "all_to_all_single";
  Call call(Op::all_to_all, kName, options.group, options.timeout, options.async_op);
  call.take(input);
  call.take(output);
  if (!call.ok || !options.input_split_sizes.empty() || !options.output_split_sizes.empty())
    return false;
  const auto members = static_cast<std::int64_t>(call.size());
  const auto shared = [&](const at::Tensor& tensor) {
    return tensor.dim() > 0 && tensor.size(0) % members == 0;
  };
  if (!shared(input) || !shared(output) || input.nbytes() != output.nbytes()) return false;
  const auto from = plain_bytes(input);
  const auto to = plain_mutable_bytes(output);
  if (!apart(from, to)) return false;
  call.give_parts(from, from.size() / call.size());
  call.get_parts(to, to.size() / call.size());
  return call.run(Slices::right);
}

bool all_to_all(const TensorList& output_tensor_list, const TensorList& input_tensor_list,
                const CollectiveOptions& options) {
  static constexpr Name kName = "all_to_all";
  Call call(Op::all_to_all, kName, options.group, options.timeout, options.async_op);
  call.take_all(input_tensor_list);
  call.take_all(output_tensor_list);
  if (!call.ok || input_tensor_list[call.rank()].numel() != output_tensor_list[call.rank()].numel())
    return false;
  call.give_all(input_tensor_list);
  call.get_all(output_tensor_list);
  return call.run(Slices::right_if_apart, output_tensor_list);
}

bool barrier(const BarrierOptions& options) {
  static constexpr Name kName = "barrier";
  Call call(Op::barrier, kName, options.group, options.timeout, options.async_op);
  return call.ok && call.run(Slices::right);
}

bool send(const at::Tensor& tensor, const SendOptions& options) {
  static constexpr Name kName = "send";
  Call call(Op::send, kName, options.group, options.timeout, false);
  call.message(options.dst, options.group_dst, options.tag);
  call.take(tensor);
  if (!call.ok) return false;
  call.give(plain_bytes(tensor));
  return call.run(Slices::right);
}

std::optional<int> recv(const at::Tensor& tensor, const RecvOptions& options) {
  static constexpr Name kName = "recv";
  Call call(Op::recv, kName, options.group, options.timeout, false);
  call.message(options.src, options.group_src, options.tag);
  call.take(tensor);
  if (!call.ok) return {};
  call.get(plain_mutable_bytes(tensor));
  if (!call.run(Slices::right)) return {};
  return call.other_end();
}

}  // namespace muster::group::plain
