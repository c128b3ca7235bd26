// SPDX-License-Identifier: BSD-3-Clause
#include "muster/objects.h"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <numeric>
#include <utility>

#include "core/group/call/call_builder.h"
#include "core/group/errors.h"
#include "core/group/group_core.h"
#include "core/group/resolve.h"

namespace muster::group {
namespace {

enum class ExchangeKind : std::int64_t { broadcast, all_gather, gather, scatter, send };
constexpr std::array<std::string_view, 5> kNames{"broadcast_object_list", "all_gather_object",
                                                 "gather_object", "scatter_object_list",
                                                 "send_object_list"};
constexpr std::string_view kReceive = "recv_object_list";
/// Reserved tags, so that a tensor never matches a list of objects.
constexpr std::int64_t kNoteTag = (std::int64_t{1} << 62) - 2;
constexpr std::int64_t kBytesTag = kNoteTag + 1;

std::string_view name_of(ExchangeKind kind) { return kNames[static_cast<std::size_t>(kind)]; }

/// A member's description of its call, sent before any object.
struct ObjectNote {
  ExchangeKind kind = ExchangeKind::broadcast;
  std::int64_t root = -1;
  std::int64_t length = 0;  // list length, if it must be equal on all members
  std::uint64_t type = 0;
  std::int64_t bytes = 0;
  char refused[152] = {};  // why this member's call is invalid; empty: it is valid
};
static_assert(sizeof(ObjectNote) == 192);

std::string refusal(const ObjectNote& note) {
  return {note.refused, strnlen(note.refused, sizeof note.refused)};
}

at::Tensor bytes_on(at::Device device, std::int64_t count) {
  return at::empty({count}, at::TensorOptions(at::kByte).device(device));
}

at::Tensor to_tensor(at::Device device, const void* data, std::size_t size) {
  auto tensor = at::empty({static_cast<std::int64_t>(size)}, at::kByte);
  if (size > 0) std::memcpy(tensor.mutable_data_ptr(), data, size);
  return tensor.to(device);
}

std::string to_text(const at::Tensor& tensor) {
  const auto here = tensor.cpu();
  return {static_cast<const char*>(here.const_data_ptr()), static_cast<std::size_t>(here.numel())};
}

at::Device device_for(const ProcessGroup& group, std::optional<at::Device> device) {
  return device.value_or(core_of(group).exchange_device());
}

/// Encodes a list as one block: each object's length, then the objects.
std::string join(const ObjectBytes& objects) {
  std::size_t total = objects.size() * sizeof(std::uint64_t);
  for (const auto& object : objects) total += object.size();
  if (total > static_cast<std::size_t>(kObjectLimit))
    invalid("the objects have " + std::to_string(total) + " bytes, and one rank may give " +
            std::to_string(kObjectLimit) + " to one call; send what is large as tensors");
  std::string block;
  block.reserve(total);
  for (const auto& object : objects) {
    const std::uint64_t size = object.size();
    block.append(reinterpret_cast<const char*>(&size), sizeof size);
  }
  for (const auto& object : objects) block += object;
  return block;
}

/// Empty if the block is not a list of `length` objects.
std::optional<ObjectBytes> parts_of(std::string_view block, std::size_t length) {
  if (length > block.size() / sizeof(std::uint64_t)) return {};
  std::size_t at = length * sizeof(std::uint64_t);
  ObjectBytes objects;
  for (std::size_t i = 0; i < length; ++i) {
    std::uint64_t size = 0;
    std::memcpy(&size, block.data() + i * sizeof size, sizeof size);
    if (size > block.size() - at) return {};
    objects.emplace_back(block.substr(at, size));
    at += size;
  }
  if (at != block.size()) return {};
  return objects;
}

/// One member's side of one collective: its note, the other members' notes, and the steps that
/// follow.
class Exchange {
 public:
  Exchange(const ObjectCall& call, Group group, ExchangeKind kind)
      : group_(std::move(group)),
        timeout_(call.timeout),
        device_(device_for(*group_, call.device)) {
    mine_.kind = kind;
    mine_.type = call.type;
  }

  int rank() const { return group_->rank(); }
  int size() const { return group_->size(); }
  int root() const { return static_cast<int>(mine_.root); }
  const ProcessGroup& group() const { return *group_; }
  const ObjectNote& note(int member) const { return notes_[static_cast<std::size_t>(member)]; }

  /// `prepare(note)` fills this member's note and may throw; then all members compare notes. Throws
  /// on every member if the calls do not match.
  template <class Prepare>
  void agree(Prepare prepare) {
    std::exception_ptr problem;
    try {
      prepare(mine_);
    } catch (const std::exception& error) {
      problem = std::current_exception();
      std::strncpy(mine_.refused, error.what(), sizeof mine_.refused - 1);
      if (mine_.refused[0] == 0) mine_.refused[0] = '?';
    }
    exchange_notes();
    if (problem) rethrow(problem);
    compare();
  }

  /// Broadcasts `block` from the root; returns it on other members.
  std::string broadcast(const std::string& block) {
    auto tensor = rank() == root() ? to_tensor(device_, block.data(), block.size())
                                   : bytes_on(device_, note(root()).bytes);
    broadcast(tensor);
    return rank() == root() ? std::string() : to_text(tensor);
  }
  ObjectBytes all_gather(const std::string& object) {
    TensorList received;
    for (int member = 0; member < size(); ++member)
      received.push_back(bytes_on(device_, note(member).bytes));
    all_gather(to_tensor(device_, object.data(), object.size()), received);
    return texts_of(received);
  }
  /// Sends `give[r]` to r and receives `take[r]` bytes from r.
  ObjectBytes all_to_all(const ObjectBytes& give, const std::vector<std::int64_t>& take) {
    TensorList given, received;
    for (const auto& object : give)
      given.push_back(to_tensor(device_, object.data(), object.size()));
    for (const auto bytes : take) received.push_back(bytes_on(device_, bytes));
    Call call = begin(Op::all_to_all);
    CallBuilder(call).add_input(given);
    CallBuilder(call).add_output(received);
    submit(call);
    return texts_of(received);
  }
  /// Broadcasts the sizes of the root's objects, one per member.
  std::vector<std::int64_t> broadcast_sizes(const ObjectBytes& objects) {
    std::vector<std::int64_t> sizes(static_cast<std::size_t>(size()));
    for (std::size_t i = 0; i < objects.size(); ++i)
      sizes[i] = static_cast<std::int64_t>(objects[i].size());
    auto tensor = to_tensor(device_, sizes.data(), sizes.size() * sizeof(std::int64_t));
    broadcast(tensor);
    const auto text = to_text(tensor);
    std::memcpy(sizes.data(), text.data(), text.size());
    for (const auto bytes : sizes)
      if (bytes < 0 || bytes > kObjectLimit)
        fail("the root announced an object of " + std::to_string(bytes) + " bytes");
    return sizes;
  }

  [[noreturn]] void fail(const std::string& what, Code code = Code::mismatch,
                         std::vector<int> ranks = {}) const {
    throw DistError(std::string(name_of(mine_.kind)) + " on rank " +
                        std::to_string(core_of(group_).first_rank_of(rank())) + " (group " +
                        group_->name() + "): " + what,
                    code, std::move(ranks));
  }

 private:
  Call begin(Op op) const { return Call(*group_, op, FunctionName(name_of(mine_.kind)), timeout_); }
  void submit(Call& call) {
    CallBuilder(call).check();
    core_of(group_).submit(call);
  }
  void broadcast(const at::Tensor& tensor) {
    Call call = begin(Op::broadcast);
    CallBuilder(call).root("root", {}, root());
    CallBuilder(call).in_place(tensor);
    submit(call);
  }
  void all_gather(const at::Tensor& mine, const TensorList& received) {
    Call call = begin(Op::all_gather);
    CallBuilder(call).add_input(mine);
    CallBuilder(call).add_output(received);
    submit(call);
  }
  static ObjectBytes texts_of(const TensorList& tensors) {
    ObjectBytes texts;
    for (const auto& tensor : tensors) texts.push_back(to_text(tensor));
    return texts;
  }

  void exchange_notes() {
    notes_.resize(static_cast<std::size_t>(size()));
    TensorList received;
    for (int member = 0; member < size(); ++member)
      received.push_back(bytes_on(device_, sizeof(ObjectNote)));
    all_gather(to_tensor(device_, &mine_, sizeof mine_), received);
    const auto texts = texts_of(received);
    for (std::size_t member = 0; member < texts.size(); ++member)
      std::memcpy(&notes_[member], texts[member].data(), sizeof(ObjectNote));
  }

  [[noreturn]] void rethrow(const std::exception_ptr& problem) const {
    try {
      std::rethrow_exception(problem);
    } catch (const std::exception& error) {
      fail(error.what(), Code::invalid_argument);
    }
  }

  /// All members have the same notes in the same order, so all find the same fault.
  void compare() const {
    for (int member = 0; member < size(); ++member) {
      if (const auto& theirs = note(member); theirs.kind != note(0).kind)
        throw_mismatch(member, called(note(0)), called(theirs));
    }
    for (int member = 0; member < size(); ++member) {
      const auto& theirs = note(member);
      const int global = core_of(group_).first_rank_of(member);
      if (const auto why = refusal(theirs); !why.empty())
        fail("rank " + std::to_string(global) + " could not take part: " + why +
                 "; correct the call there",
             Code::invalid_argument, {global});
      if (theirs.root != note(0).root)
        throw_mismatch(member, "it with root " + std::to_string(note(0).root),
                       "it with root " + std::to_string(theirs.root));
      if (theirs.length != note(0).length)
        throw_mismatch(member, "it with a list of length " + std::to_string(note(0).length),
                       "it with a list of length " + std::to_string(theirs.length));
      if (theirs.type != note(0).type && theirs.type != 0 && note(0).type != 0)
        throw_mismatch(member, "it with objects of one type", "it with objects of another type");
      if (theirs.bytes < 0 || theirs.bytes > kObjectLimit)
        fail("rank " + std::to_string(global) + " announced " + std::to_string(theirs.bytes) +
                 " bytes, and one rank may give " + std::to_string(kObjectLimit),
             Code::mismatch, {global});
    }
  }
  static std::string called(const ObjectNote& note) {
    return static_cast<std::uint64_t>(note.kind) < kNames.size() ? std::string(name_of(note.kind))
                                                                 : "an unknown object collective";
  }
  [[noreturn]] void throw_mismatch(int member, const std::string& first,
                                   const std::string& other) const {
    const int zero = core_of(group_).first_rank_of(0),
              theirs = core_of(group_).first_rank_of(member);
    fail("rank " + std::to_string(zero) + " called " + first + ", rank " + std::to_string(theirs) +
             " called " + other + "; every member must make the same call",
         Code::mismatch, {zero, theirs});
  }

  const Group group_;
  const std::optional<Duration> timeout_;
  const at::Device device_;
  ObjectNote mine_;
  std::vector<ObjectNote> notes_;
};

int root_of(const Exchange& exchange, std::string_view keyword, ObjectRank rank) {
  return group_rank(exchange.group(), keyword, rank.global, rank.local, 0);
}

void need_length(const char* list, std::size_t length, int wanted) {
  if (length != static_cast<std::size_t>(wanted))
    invalid(std::string(list) + " has length " + std::to_string(length) + " and must have " +
            std::to_string(wanted) + ", one entry per member of the group");
}

/// Runs `pack`, which must return `count` objects within the size limit.
ObjectBytes packed(const PackObjects& pack, std::size_t count) {
  auto objects = pack();
  if (objects.size() != count)
    invalid("expected " + std::to_string(count) + " serialised objects and got " +
            std::to_string(objects.size()));
  for (const auto& object : objects)
    if (object.size() > static_cast<std::size_t>(kObjectLimit))
      invalid("an object has " + std::to_string(object.size()) + " bytes, and one rank may give " +
              std::to_string(kObjectLimit) + " to one call; send what is large as tensors");
  return objects;
}

}  // namespace

std::optional<ObjectBytes> broadcast_objects(const ObjectCall& call, ObjectRank src,
                                             std::size_t length, const PackObjects& pack) {
  auto group = acting(call.group, name_of(ExchangeKind::broadcast));
  if (!group) return {};
  Exchange exchange(call, std::move(group), ExchangeKind::broadcast);
  std::string block;
  exchange.agree([&](ObjectNote& note) {
    note.length = static_cast<std::int64_t>(length);
    note.root = root_of(exchange, "src", src);
    if (exchange.rank() != note.root) return;
    block = join(packed(pack, length));
    note.bytes = static_cast<std::int64_t>(block.size());
  });
  const auto received = exchange.broadcast(block);
  if (exchange.rank() == exchange.root()) return {};
  auto objects = parts_of(received, length);
  if (!objects) exchange.fail("what came is no list of " + std::to_string(length) + " objects");
  return objects;
}

std::optional<ObjectBytes> all_gather_objects(const ObjectCall& call, std::size_t length,
                                              const PackObjects& pack) {
  auto group = acting(call.group, name_of(ExchangeKind::all_gather));
  if (!group) return {};
  Exchange exchange(call, std::move(group), ExchangeKind::all_gather);
  std::string object;
  exchange.agree([&](ObjectNote& note) {
    need_length("object_list", length, exchange.size());
    object = std::move(packed(pack, 1).front());
    note.bytes = static_cast<std::int64_t>(object.size());
  });
  return exchange.all_gather(object);
}

std::optional<ObjectBytes> gather_objects(const ObjectCall& call, ObjectRank dst,
                                          std::size_t length, const PackObjects& pack) {
  auto group = acting(call.group, name_of(ExchangeKind::gather));
  if (!group) return {};
  Exchange exchange(call, std::move(group), ExchangeKind::gather);
  std::string object;
  exchange.agree([&](ObjectNote& note) {
    note.root = root_of(exchange, "dst", dst);
    if (exchange.rank() == note.root)
      need_length("object_gather_list", length, exchange.size());
    else if (length != 0)
      invalid("object_gather_list belongs to dst alone, and got " + std::to_string(length) +
              " entries here; leave it out");
    object = std::move(packed(pack, 1).front());
    note.bytes = static_cast<std::int64_t>(object.size());
  });
  const auto members = static_cast<std::size_t>(exchange.size());
  const bool receives = exchange.rank() == exchange.root();
  ObjectBytes give(members);
  give[static_cast<std::size_t>(exchange.root())] = std::move(object);
  std::vector<std::int64_t> take(members, 0);
  for (int member = 0; receives && member < exchange.size(); ++member)
    take[static_cast<std::size_t>(member)] = exchange.note(member).bytes;
  auto objects = exchange.all_to_all(give, take);
  if (!receives) return {};
  return objects;
}

std::optional<std::string> scatter_objects(const ObjectCall& call, ObjectRank src,
                                           std::size_t output_length, std::size_t input_length,
                                           const PackObjects& pack) {
  auto group = acting(call.group, name_of(ExchangeKind::scatter));
  if (!group) return {};
  Exchange exchange(call, std::move(group), ExchangeKind::scatter);
  ObjectBytes give;
  exchange.agree([&](ObjectNote& note) {
    note.root = root_of(exchange, "src", src);
    if (output_length == 0)
      invalid("scatter_object_output_list is empty; give it one entry to be written");
    if (exchange.rank() != note.root) return;
    need_length("scatter_object_input_list", input_length, exchange.size());
    give = packed(pack, input_length);
  });
  const auto members = static_cast<std::size_t>(exchange.size());
  const auto sizes = exchange.broadcast_sizes(give);
  give.resize(members);
  std::vector<std::int64_t> take(members, 0);
  take[static_cast<std::size_t>(exchange.root())] =
      sizes[static_cast<std::size_t>(exchange.rank())];
  return std::move(exchange.all_to_all(give, take)[static_cast<std::size_t>(exchange.root())]);
}

void send_objects(const ObjectCall& call, ObjectRank dst, const PackObjects& pack) {
  const auto name = name_of(ExchangeKind::send);
  const auto group = acting(call.group, name);
  if (!group) return;
  int peer = 0;
  ObjectBytes objects;
  std::string block;
  try {
    peer = group_rank(*group, "dst", dst.global, dst.local);
    objects = pack();
    block = join(objects);
  } catch (const std::exception& why) {
    core_of(group).refuse(Op::send, name, why);
  }
  const auto device = device_for(*group, call.device);
  ObjectNote note;
  note.kind = ExchangeKind::send;
  note.length = static_cast<std::int64_t>(objects.size());
  note.type = call.type;
  note.bytes = static_cast<std::int64_t>(block.size());
  const auto submit = [&](const at::Tensor& tensor, std::int64_t tag) {
    Call message(*group, Op::send, FunctionName(name), call.timeout);
    CallBuilder build(message);
    build.peer("dst", {}, peer, tag);
    build.add_input(tensor);
    build.check();
    core_of(group).submit(message);
  };
  submit(to_tensor(device, &note, sizeof note), kNoteTag);
  submit(to_tensor(device, block.data(), block.size()), kBytesTag);
}

ReceivedObjects recv_objects(const ObjectCall& call, ObjectRank src, std::size_t length) {
  const auto group = acting(call.group, kReceive);
  if (!group) return {};
  const bool any = !src.global && !src.local;
  int peer = kAnyRank;
  try {
    if (!any) peer = group_rank(*group, "src", src.global, src.local);
  } catch (const std::exception& why) {
    core_of(group).refuse(Op::recv, kReceive, why);
  }
  const auto device = device_for(*group, call.device);
  const auto submit = [&](const at::Tensor& tensor, int from, std::int64_t tag) {
    Call message(*group, Op::recv, FunctionName(kReceive), call.timeout);
    CallBuilder build(message);
    from == kAnyRank ? build.tag(tag) : build.peer("src", {}, from, tag);
    build.add_output(tensor);
    build.check();
    const auto work = core_of(group).submit(message);
    if (work == nullptr) return group->global_rank_of(from);
    work->wait();
    return work->source_rank();
  };
  auto words = bytes_on(device, sizeof(ObjectNote));
  const int source = submit(words, peer, kNoteTag);
  ObjectNote note;
  std::memcpy(&note, to_text(words).data(), sizeof note);
  const auto say = [&](const std::string& what) {
    throw DistError(std::string(kReceive) + " from rank " + std::to_string(source) + " in group '" +
                        group->name() + "': " + what,
                    Code::mismatch, {source});
  };
  if (note.bytes < 0 || note.bytes > kObjectLimit || note.length < 0)
    say("it announced " + std::to_string(note.length) + " objects of " +
        std::to_string(note.bytes) + " bytes; at most " + std::to_string(kObjectLimit) +
        " are taken");
  auto block = bytes_on(device, note.bytes);
  submit(block, group->group_rank_of(source), kBytesTag);
  if (note.length != static_cast<std::int64_t>(length))
    say("it sent a list of " + std::to_string(note.length) + " objects, and the list here has " +
        std::to_string(length) + "; give both the same length");
  if (note.type != 0 && call.type != 0 && note.type != call.type)
    say("it sent objects of another type than the list here holds");
  auto objects = parts_of(to_text(block), length);
  if (!objects) say("what came is no list of " + std::to_string(length) + " objects");
  return {std::move(*objects), source};
}

}  // namespace muster::group
