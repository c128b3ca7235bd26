/// What a State is made of, for the files that make it.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "jobs/elastic/memory_commits.h"
#include "muster/checkpoint.h"
#include "muster/elastic.h"

namespace muster::elastic {

/// One commit of what all ranks have alike. Memory of tensors stays for later ones.
struct Commit {
  std::int64_t number = 0;  // 0: none
  std::vector<std::string> names;
  std::vector<at::Tensor> tensors;
  std::string values;
};

/// What a ShardedState has bound.
struct BoundShards {
  checkpoint::State held;
  std::vector<torch::nn::Module*> modules;
  bool is_restored = false;
};

struct State::StateParts {
  checkpoint::State held;
  std::vector<torch::nn::Module*> modules;
  std::vector<std::pair<std::int64_t, at::Generator>> generators;
  // Without shards: as no rank has more than the others, a survivor has everything.
  Commit commits[2];
  int current = 0;  // of `commits`
  // With shards.
  MemoryCommits memory;
  std::int64_t in_memory = 0;  // number of the last commit there; 0: commits are in `commits`
  BoundShards* bound = nullptr;

  Commit& last() { return commits[current]; }
  Commit& spare() { return commits[1 - current]; }
  void turn() { current = 1 - current; }
  std::int64_t number() { return in_memory > 0 ? in_memory : last().number; }

  void take(std::int64_t number);
  void put_back(int rank);
  void seed(int rank);

  /// Whether the next commit has shards in it. Throws where they are missing, or not restored yet.
  bool commits_in_memory() const;
  CommitContents contents() const;
  /// Collective; all, or without what is bound. `here`: the last commit of this rank; not
  /// collective.
  void fill_from(const FoundCommit& commit, bool with_bound, bool here = false);
};

}  // namespace muster::elastic
