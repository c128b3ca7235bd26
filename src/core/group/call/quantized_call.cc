// SPDX-License-Identifier: BSD-3-Clause
#include "core/group/call/quantized_call.h"

#include <cstring>
#include <string>

#include "core/collective/call.h"
#include "core/group/backends/native.h"
#include "core/group/call/call_builder.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"

namespace muster::group {

std::string_view name_of(Compression compression) {
  switch (compression) {
    case Compression::none: return "none";
    case Compression::bf16: return "bf16";
    case Compression::int8: return "int8";
    case Compression::int4: return "int4";
  }
  return "an unknown compression";
}

namespace {

/// The facts may be those of another member, so their numbers may be in no table.
std::string text_of(const CalledFacts& facts) {
  std::string text(group::name_of(static_cast<Compression>(facts.compression)));
  text += " of " + std::to_string(facts.values) + " values of ";
  text += static_cast<int>(facts.dtype) < kDTypes ? muster::name_of(facts.dtype) : "unknown type";
  if (facts.op != Op::all_reduce && facts.op != Op::reduce_scatter) return text;
  const auto reduce = static_cast<collective::Reduce>(facts.reduce);
  text += " reduced by ";
  text +=
      facts.reduce < collective::kReduces ? collective::name_of(reduce) : "an unknown operation";
  return text;
}

/// The ordinary call, with its encoding.
transport::Fingerprint whole_of(const Call& plain, Compression compression) {
  transport::Fingerprint whole = collective::fingerprint_of(plain.args, 0);
  whole.flags =
      static_cast<std::uint8_t>(static_cast<int>(compression) << collective::kEncodingShift);
  return whole;
}

/// The engine of the group's calls on CPU memory; null if another backend makes them.
const collective::Communicator* engine_of(const GroupCore& group) {
  for (const auto& [device, backend] : group.parts().backends) {
    if (device != c10::DeviceType::CPU) continue;
    const auto* native = dynamic_cast<const NativeBackend*>(backend.get());
    return native == nullptr ? nullptr : native->communicator().get();
  }
  return nullptr;
}

}  // namespace

QuantizedCall::QuantizedCall(Call& plain, Compression compression, std::optional<Duration> timeout)
    : group_(plain.group().shared_from_this()),
      name_(plain.name()),
      op_(plain.op()),
      reduce_(plain.args.reduce),
      compression_(compression),
      dtype_(plain.args.dtype),
      tag_(plain.args.tag),
      whole_(whole_of(plain, compression)),
      limit_(deadline_after(steady_clock(), timeout.value_or(group_->timeout()))) {}

bool QuantizedCall::on_cpu() const { return group_->exchange_device().is_cpu(); }

bool QuantizedCall::prepares_calls() const {
  const auto* engine = engine_of(*group_);
  return engine != nullptr && engine->prepares_calls();
}

bool QuantizedCall::takes_pieces() const {
  const auto* engine = engine_of(*group_);
  return on_cpu() && engine != nullptr && engine->takes_pieces();
}

WorkRef QuantizedCall::all_reduce(const at::Tensor& values, collective::PieceSums& pieces,
                                  bool async) const {
  Call call(*group_, Op::all_reduce, FunctionName(name_), time_left(steady_clock(), limit_), async);
  call.args.tag = tag_;
  call.args.part_of = whole_;
  call.args.pieces = &pieces;
  CallBuilder build(call);
  build.in_place(values);
  build.reduces(reduce_ == collective::Reduce::avg ? ReduceOp::AVG : ReduceOp::SUM);
  build.check();
  return group_->submit(call);
}

void QuantizedCall::write_facts(std::byte* message, std::size_t described) const {
  const CalledFacts facts = called_on(described);
  std::memcpy(message, &facts, sizeof facts);
}

void QuantizedCall::write(std::byte* message, const std::byte* values, std::size_t count,
                          std::size_t described) const {
  write_facts(message, described);
  encode(values_in(message), values, count);
}

Status QuantizedCall::compare(const std::byte* message, std::size_t sender,
                              std::size_t described) const {
  CalledFacts facts;
  std::memcpy(&facts, message, sizeof facts);
  if (facts == called_on(described)) return {};
  const int other = group_->first_rank_of(static_cast<int>(sender));
  const int here = group_->first_rank_of(group_->rank());
  return Status(Code::mismatch,
                std::string(name_) + " with compression (group " + group_->name() + "): rank " +
                    std::to_string(here) + " called it with " + text_of(called_on(described)) +
                    ", rank " + std::to_string(other) + " with " + text_of(facts) +
                    "; give the same on all ranks",
                {here, other});
}

void QuantizedCall::require(const Status& same) const {
  if (same.ok()) return;
  group_->abort(same.message());
  throw DistError(same);
}

CalledFacts QuantizedCall::called_on(std::size_t values) const {
  return {.values = static_cast<std::int64_t>(values),
          .op = op_,
          .reduce = static_cast<std::uint8_t>(reduce_),
          .compression = static_cast<std::uint8_t>(compression_),
          .dtype = dtype_};
}

WorkRef QuantizedCall::run(Op op, const TensorList& inputs, const TensorList& outputs, int root,
                           bool async, const std::function<Status()>* prepare) const {
  const at::Device device = group_->exchange_device();
  const auto moved = [&](const TensorList& tensors) {
    TensorList there;
    for (const auto& tensor : tensors) there.push_back(tensor.to(device));
    return there;
  };
  const bool here = device.is_cpu();
  const TensorList in = here ? inputs : moved(inputs), out = here ? outputs : moved(outputs);
  Call call(*group_, op, FunctionName(name_), time_left(steady_clock(), limit_), async && here);
  call.args.tag = tag_;
  call.args.part_of = whole_;
  call.record.prepare = prepare;
  CallBuilder build(call);
  if (op == Op::broadcast) {
    build.root("src", {}, root);
    build.in_place(out.front());
  } else {
    if (op == Op::all_to_all)
      build.add_input(in);
    else
      build.add_input(in.front());
    build.add_output(out);
  }
  build.check();
  auto work = group_->submit(call);
  if (here) return work;
  for (std::size_t i = 0; i < out.size(); ++i) {
    at::Tensor back = outputs[i];
    back.copy_(out[i]);
  }
  return nullptr;
}

}  // namespace muster::group
