// SPDX-License-Identifier: BSD-3-Clause
#include "jobs/membership/stored_values.h"

#include <algorithm>

#include "core/base/bytes.h"

namespace muster::membership {
namespace {

constexpr std::size_t kShown = 200;

}  // namespace

Secret::Proof ValueProof::proof_of(std::string_view key, std::string_view value) const {
  const std::string text = ByteWriter()
                               .put_text("muster membership in " + service_)
                               .put_text(key)
                               .put_text(value)
                               .take();
  return secret_.prove(as_bytes(text));
}

std::string ValueProof::sign(std::string_view key, std::string_view value) const {
  const Secret::Proof proof = proof_of(key, value);
  return std::string(as_text(proof)).append(value);
}

std::optional<std::string> ValueProof::open(std::string_view key, std::string_view stored) const {
  const std::string_view value = stored.substr(std::min(stored.size(), sizeof(Secret::Proof)));
  const std::string_view proof = stored.substr(0, stored.size() - value.size());
  if (!equal_in_constant_time(as_bytes(proof), proof_of(key, value))) return std::nullopt;
  return std::string(value);
}

Status ValueProof::missing(const std::string& what) const {
  return Status(Code::refused, what + " in " + service_ +
                                   " carries no proof of this job's secret; set the same "
                                   "MUSTER_SECRET on all nodes, unless somebody else writes into " +
                                   service_);
}

Status held_by_another(std::string_view name, std::string_view value) {
  const auto is_readable = [](char each) { return each >= ' ' && each <= '~'; };
  const bool readable =
      !value.empty() && value.size() <= kShown && std::ranges::all_of(value, is_readable);
  return Status(Code::refused,
                "the name \"" + std::string(name) + "\" is held by another process" +
                    (readable ? ", which says of itself: " + std::string(value) : std::string()));
}

namespace {

constexpr std::uint8_t kVersion = 8;

Status foreign(const std::string& what) {
  return Status(Code::mismatch, "the record of the job's epoch " + what +
                                    "; run the same muster on all nodes, and give every job an "
                                    "--rdzv-id of its own");
}

std::int64_t nanoseconds_in(Duration time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time).count();
}

std::string in_words(const Epoch& epoch) {
  return epoch.number == 0 ? "there is none yet" : "epoch " + std::to_string(epoch.number);
}

}  // namespace

Status judge_commit(const Epoch& epoch, std::int64_t expected_revision, const Epoch& present,
                    std::int64_t revision) {
  if (revision == expected_revision && present.number < epoch.number) return {};
  return Status(Code::refused, "epoch " + std::to_string(epoch.number) + " on top of revision " +
                                   std::to_string(expected_revision) +
                                   " is refused: the present one is " + in_words(present) +
                                   " at revision " + std::to_string(revision));
}

std::string encode(const Epoch& epoch) {
  ByteWriter writer;
  writer.put(kVersion)
      .put(epoch.number)
      .put(static_cast<std::uint8_t>(epoch.state))
      .put(epoch.restarts)
      .put(epoch.exit_code)
      .put_text(epoch.reason)
      .put_text(epoch.launch)
      .put(static_cast<std::uint32_t>(epoch.members.size()));
  for (const Member& member : epoch.members)
    writer.put(member.slot).put_text(member.name).put_text(member.value).put(member.joined);
  writer.put(static_cast<std::uint32_t>(epoch.blames.size()));
  for (const RecordedBlame& blame : epoch.blames)
    writer.put(blame.one).put(blame.other).put(blame.committed).put(nanoseconds_in(blame.ago));
  writer.put(static_cast<std::uint32_t>(epoch.left_out.size()));
  for (const RecordedAbsence& absence : epoch.left_out)
    writer.put_text(absence.incarnation).put(nanoseconds_in(absence.ago));
  writer.put(static_cast<std::uint32_t>(epoch.troubles.size()));
  for (const RecordedTrouble& trouble : epoch.troubles)
    writer.put_text(trouble.host).put(nanoseconds_in(trouble.ago));
  writer.put(epoch.committed)
      .put(epoch.lost_in)
      .put(epoch.state_in)
      .put(static_cast<std::uint8_t>(epoch.state_divided))
      .put(epoch.parts_gone)
      .put(static_cast<std::uint32_t>(epoch.keepers.size()));
  for (const RecordedKeeper& keeper : epoch.keepers)
    writer.put_text(keeper.incarnation)
        .put_text(keeper.host)
        .put(keeper.kept_in)
        .put(nanoseconds_in(keeper.ago));
  return writer.take();
}

namespace {

/// Whether a failure may be so long ago; times that no job has would overflow those of a clock.
bool may_be_ago(Duration time) {
  constexpr Duration kLongest =
      std::chrono::hours(10 * 366 * 24);  // limit: no job runs for so long
  return time >= Duration(0) && time <= kLongest;
}

/// False: no epoch says so.
bool read_failures(ByteReader& reader, Epoch& epoch) {
  const auto blames = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < blames && reader.ok(); ++i) {
    RecordedBlame blame;
    blame.one = reader.get<std::int32_t>();
    blame.other = reader.get<std::int32_t>();
    blame.committed = reader.get<std::int64_t>();
    blame.ago = std::chrono::nanoseconds(reader.get<std::int64_t>());
    const bool nobody = blame.one == -1 && blame.other == -1;
    if (reader.ok() && ((!nobody && blame.one < 0) || blame.other < blame.one ||
                        blame.committed < 0 || !may_be_ago(blame.ago)))
      return false;
    epoch.blames.push_back(blame);
  }
  const auto absences = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < absences && reader.ok(); ++i) {
    RecordedAbsence absence;
    absence.incarnation = reader.get_text();
    absence.ago = std::chrono::nanoseconds(reader.get<std::int64_t>());
    if (reader.ok() && !may_be_ago(absence.ago)) return false;
    epoch.left_out.push_back(std::move(absence));
  }
  const auto troubles = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < troubles && reader.ok(); ++i) {
    RecordedTrouble trouble;
    trouble.host = reader.get_text();
    trouble.ago = std::chrono::nanoseconds(reader.get<std::int64_t>());
    if (reader.ok() && !may_be_ago(trouble.ago)) return false;
    epoch.troubles.push_back(std::move(trouble));
  }
  return true;
}

/// False: no epoch says so.
bool read_state(ByteReader& reader, Epoch& epoch) {
  epoch.committed = reader.get<std::int64_t>();
  epoch.lost_in = reader.get<std::int64_t>();
  epoch.state_in = reader.get<std::int64_t>();
  const auto divided = reader.get<std::uint8_t>();
  epoch.state_divided = divided == 1;
  epoch.parts_gone = reader.get<std::int32_t>();
  const auto keepers = reader.get<std::uint32_t>();
  for (std::uint32_t i = 0; i < keepers && reader.ok(); ++i) {
    RecordedKeeper keeper;
    keeper.incarnation = reader.get_text();
    keeper.host = reader.get_text();
    keeper.kept_in = reader.get<std::int64_t>();
    keeper.ago = std::chrono::nanoseconds(reader.get<std::int64_t>());
    if (reader.ok() && (keeper.kept_in < 1 || !may_be_ago(keeper.ago))) return false;
    epoch.keepers.push_back(std::move(keeper));
  }
  return !reader.ok() || (epoch.committed >= 0 && epoch.lost_in >= 0 && epoch.state_in >= 0 &&
                          divided <= 1 && epoch.parts_gone >= 0);
}

}  // namespace

Result<Epoch> decode_epoch(std::string_view record) {
  ByteReader reader(record);
  if (reader.get<std::uint8_t>() != kVersion) return foreign("is of another version of muster");
  Epoch epoch;
  epoch.number = reader.get<std::int64_t>();
  const auto state = reader.get<std::uint8_t>();
  epoch.restarts = reader.get<std::int32_t>();
  epoch.exit_code = reader.get<std::int32_t>();
  epoch.reason = reader.get_text();
  epoch.launch = reader.get_text();
  const auto count = reader.get<std::uint32_t>();
  std::int32_t last = -1;
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    Member member;
    member.slot = reader.get<std::int32_t>();
    member.name = reader.get_text();
    member.value = reader.get_text();
    member.joined = reader.get<std::int64_t>();
    if (!reader.ok()) break;
    if (member.slot <= last) return foreign("has slots that are not in order");
    last = member.slot;
    epoch.members.push_back(std::move(member));
  }
  const bool fits = read_failures(reader, epoch) && read_state(reader, epoch);
  if (fits && !reader.at_end()) return foreign("is torn");
  if (!fits || epoch.number < 1 || epoch.restarts < 0 ||
      state > static_cast<std::uint8_t>(JobState::failed))
    return foreign("holds numbers that no epoch has");
  epoch.state = static_cast<JobState>(state);
  return epoch;
}

}  // namespace muster::membership
