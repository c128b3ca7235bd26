// SPDX-License-Identifier: BSD-3-Clause
// Prints the pipeline tables that standard input asks for, one request a line: schedule, ranks,
// stages per rank, micro-batches. Each is answered by one line a rank, its actions parted by commas
// as in torch's CSV, and an empty line; or by "refused: " and the reason.
#include <iostream>
#include <string>

#include "muster/pipeline_table.h"

namespace {

muster::Result<muster::PipelineTable> table_of(const std::string& schedule, int ranks, int stages,
                                               int micro_batches) {
  if (schedule == "GPipe") return muster::gpipe_table(ranks, micro_batches);
  if (schedule == "1F1B") return muster::one_f_one_b_table(ranks, micro_batches);
  if (schedule == "ZBV") return muster::zbv_table(ranks, micro_batches);
  return muster::interleaved_1f1b_table(ranks, stages, micro_batches);
}

}  // namespace

int main() {
  std::string schedule;
  int ranks = 0, stages = 0, micro_batches = 0;
  while (std::cin >> schedule >> ranks >> stages >> micro_batches) {
    const auto table = table_of(schedule, ranks, stages, micro_batches);
    if (!table.ok()) {
      std::cout << "refused: " << table.status().message() << "\n\n";
      continue;
    }
    for (const auto& actions : table->actions) {
      for (std::size_t i = 0; i < actions.size(); ++i)
        std::cout << (i == 0 ? "" : ",") << to_string(actions[i]);
      std::cout << "\n";
    }
    std::cout << "\n";
  }
}
