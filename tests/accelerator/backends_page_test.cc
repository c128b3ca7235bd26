// SPDX-License-Identifier: BSD-3-Clause
// docs/user/backends.md: what each backend has of every operation, reduction and dtype on tensors
// of each kind of device. It is written from what two ranks were given when they made every call.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "backend_cells.h"

namespace muster::testing {
namespace {

constexpr const char* kPageHead = R"(# What each backend has

`tools/backend_table` has written this page from calls that it made; do not edit it.

Two ranks made every call below: every operation with every dtype (float8, uint16 to uint64 and
complex32 too) and, where it reduces, every reduction. The accelerator and NCCL's library were those
of muster's tests. A call that a backend lacks throws DistBackendError with the names of both, on
every rank, and the group stays usable.

- `native` stands for `gloo` and `tcp` too, which are other names of it. It copies tensors of
  accelerators through host memory.
- [`mpi`](mpi.md) and [`ucc`](ucc.md) (experimental) have what `native` has, on tensors of each kind
  of device: what their library lacks, they compose. A test makes the same calls under each MPI.
- [`nccl`](nccl.md) serves CUDA tensors only.

## Operations

"all": every dtype, and every reduction that is defined on it. Objects, barriers and the other forms
of these operations are made of them.

| operation | `native`, `mpi`, `ucc`: CPU | the same: accelerators | `nccl`: CUDA |
| --- | --- | --- | --- |
)";

constexpr const char* kReductionsHead = R"(
## Reductions

Alike in every operation that reduces. "all": every backend has it, on tensors of each kind of
device that it serves. "others": every one but `nccl`. "-": none, since it is not defined. `nccl`
alone reduces float8_e4m3fn and float8_e5m2, by all that it has of float32.

)";

/// Lacked with that backend, for CPU tensors or those of the test device.
LackedCells lacked_on(const std::string& backend, bool on_cpus) {
  std::optional<LackedCells> lacked;
  on_nccl_ranks(
      2,
      [&](int rank) {
        auto found = LackedCells::find(rank, 2, on_cpus ? on_cpu : on_device_of(rank), !on_cpus);
        if (rank == 0) lacked = std::move(found);
      },
      backend);
  return *lacked;
}

std::string operation_cell(const LackedCells& lacked, const std::string& operation) {
  if (lacked.has_all(operation)) return " all |";
  return LackedCells::reduces(operation) ? " [some](#reductions) |" : " no |";
}

std::string header(const std::vector<std::string>& columns) {
  std::string names = "|", line = "|";
  for (const auto& column : columns) {
    names += " " + column + " |";
    line += " --- |";
  }
  return names + "\n" + line + "\n";
}

std::string page() {
  const auto here = lacked_on("native", true), staged = lacked_on("native", false),
             nccl = lacked_on("cpu:native,deferred:nccl", false);
  std::string page = kPageHead;
  for (const auto& [name, lacked] : here.operations()) {
    page += "| " + name + " |";
    for (const auto* backend : {&here, &staged, &nccl}) page += operation_cell(*backend, name);
    page += "\n";
    if (!LackedCells::reduces(name)) continue;
    for (const auto* backend : {&here, &staged, &nccl})
      EXPECT_EQ(backend->operations().at(name), backend->operations().at("all_reduce"))
          << name << " has other reductions than all_reduce; give them a table";
  }
  page += kReductionsHead;
  std::vector<std::string> columns{"dtype"};
  for (const auto& op : kReductions)
    columns.emplace_back(collective::name_of(collective::engine_reduce(op)));
  page += header(columns);
  for (const auto dtype : kReducible) {
    page += "| " + std::string(name_of(group::to_dtype(dtype))) + " |";
    for (const auto& op : kReductions) {
      const LackedCells::Kind kind{collective::name_of(collective::engine_reduce(op)), dtype};
      const bool any = !here.operations().at("all_reduce").contains(kind);
      const bool all = any && !nccl.operations().at("all_reduce").contains(kind);
      page += all ? " all |" : any ? " others |" : " - |";
    }
    page += "\n";
  }
  return page;
}

// spec: A6 what a backend lacks is in a table of the documents, which is generated; A12 each cell
// of it is a call that was made
TEST(BackendsPage, IsUpToDate) {
  const auto path = std::filesystem::path(MUSTER_SOURCE) / "docs/user/backends.md";
  if (std::getenv("MUSTER_WRITE_GALLERY") != nullptr) {
    std::ofstream(path) << page();
    return;
  }
  std::stringstream kept;
  kept << std::ifstream(path).rdbuf();
  EXPECT_EQ(kept.str(), page()) << path << " is of another build; run tools/backend_table";
}

}  // namespace
}  // namespace muster::testing
