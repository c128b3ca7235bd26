#include "faces/cli/bench/bench.h"

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <set>

#include "core/base/dtype.h"
#include "core/base/process/file_limit.h"
#include "core/base/process/temporary_folder.h"
#include "core/tunables/tuning_file.h"
#include "core/wait/topology.h"
#include "faces/cli/bench/algorithms.h"
#include "faces/cli/bench/contestant.h"
#include "faces/cli/bench/files.h"
#include "faces/cli/bench/progress_line.h"
#include "faces/cli/bench/results.h"
#include "faces/cli/bench/simulate.h"
#include "faces/cli/parse.h"

namespace muster::cli {
namespace {

using bench::Cell;
using bench::CellResult;
using bench::Contestant;
using bench::Field;
using bench::Figures;
using bench::ProgressLine;
using bench::Row;

const std::vector<std::string> kOps = {"broadcast", "all_reduce", "reduce",         "all_gather",
                                       "gather",    "scatter",    "reduce_scatter", "all_to_all",
                                       "barrier",   "ping_pong"};

/// Every worker of muster's knows these.
std::vector<std::string> dtype_names() {
  std::vector<std::string> names;
  for (int i = 0; i < kReducibleDTypes; ++i) names.emplace_back(name_of(static_cast<DType>(i)));
  return names;
}

/// Other names of what rows call by one.
const std::map<std::string, std::string> kTransports = {{"auto", "shm"}},
                                         kMemories = {{"shared", "arena"}};

struct BenchOptions {
  std::vector<std::string> ops{"all_reduce"};
  std::vector<std::uint64_t> sizes{8, 1024, 65536, 1048576, 16777216};
  std::vector<int> ranks{2};
  std::vector<std::string> rivals;
  std::string dtype = "float32";
  std::vector<std::string> memories{"private"};
  std::string json, picture;
  double seconds = 0.3;
  int rounds = 0;  // 0: three with rivals, for tuning and its check, else one
  Field field;
  bool simulate = false, check_selection = false;
  bool p2p = false;
  std::string tuning;
  bench::Simulation simulation;
};

std::vector<std::uint64_t> sizes_of(const BenchOptions& options, const std::string& op) {
  return op == "barrier" ? std::vector<std::uint64_t>{0} : options.sizes;
}

class Run {
 public:
  explicit Run(const BenchOptions& options) : options_(options), progress_(number_of_cells()) {
    libraries_ = {"muster"};
    libraries_.insert(libraries_.end(), options.rivals.begin(), options.rivals.end());
  }

  Status play() {
    std::printf("%s", bench::table_head(libraries_).c_str());
    for (const int ranks : options_.ranks) {
      if (Status played = play_ranks(ranks); !played) return played;
    }
    if (Status written = write_files(); !written) return written;
    const bool measured = std::ranges::any_of(rows_, [](const Row& row) {
      return row.library == "muster" && row.figures.iterations > 0;
    });
    return measured ? Status()
                    : Status(Code::unsupported,
                             "muster could run nothing of this; the reasons are said above");
  }

 private:
  std::size_t number_of_cells() const {
    std::size_t cells = 0;
    for (const std::string& op : options_.ops) cells += sizes_of(options_, op).size();
    std::size_t turns = 0;
    for (const int ranks : options_.ranks) {
      turns += options_.memories.size();
      for (const std::string& library : options_.rivals)
        turns += passed_over(library, ranks) ? 0 : 1;
    }
    return cells * turns * static_cast<std::size_t>(rounds());
  }
  int rounds() const {
    return options_.rounds > 0 ? options_.rounds : options_.rivals.empty() ? 1 : 3;
  }

  static bool passed_over(const std::string& library, int ranks) {
    return library == "mpich" && ranks > usable_cores();
  }

  /// All libraries stand ready at the same time and take turns; those that wait for an order sleep.
  Status play_ranks(int ranks) {
    const TemporaryFolder folder("muster-bench-");
    if (folder.path().empty())
      return Status(Code::exhausted, "no folder could be made for temporary files");
    Field field = options_.field;
    field.ranks = ranks;
    std::vector<std::unique_ptr<Contestant>> contestants;
    for (const std::string& library : libraries_) {
      if (passed_over(library, ranks)) {
        tell(library,
             "passed over where ranks outnumber cores: it spins without giving its core away, tens "
             "of milliseconds a call");
        continue;
      }
      const std::string own = folder.path() + "/" + library;
      std::filesystem::create_directory(own);
      auto plan = bench::plan_start(library, field, own);
      if (!plan) return plan.status();
      engine_ = engine_ || plan->engine;
      auto started = Contestant::start(*plan, ranks, own);
      if (!started) return started.status().with_context("starting " + library);
      contestants.push_back(std::move(*started));
    }
    for (const std::string& op : options_.ops) {
      for (const std::uint64_t bytes : sizes_of(options_, op)) {
        const Cell cell{
            op, bytes, options_.dtype, "private", options_.seconds, bench::settling_of(ranks)};
        if (Status played = play_cell(contestants, ranks, cell); !played) return played;
      }
    }
    return {};
  }

  /// muster with each of its memories, the others once: a round after the other.
  Status play_cell(std::vector<std::unique_ptr<Contestant>>& contestants, int ranks,
                   const Cell& cell) {
    std::map<std::pair<std::string, std::string>, std::vector<Figures>>
        figures;  // by library and memory
    std::map<std::string, std::string> reasons;
    for (int round = 0; round < rounds(); ++round) {
      for (const auto& contestant : contestants) {
        const std::string& library = contestant->library();
        for (const std::string& memory : memories_of(library)) {
          progress_.next(cell.op + " " + bench::size_text(cell.bytes) + ", " +
                         std::to_string(ranks) + " ranks, " + library);
          Cell own = cell;
          own.memory = memory;
          const CellResult answer = contestant->play(own);
          if (answer.figures) {
            figures[{library, memory}].push_back(*answer.figures);
            continue;
          }
          reasons.try_emplace(library, answer.reason);
          if (!answer.skipped && library == "muster") {
            return Status(Code::internal, cell.op + " of " + std::to_string(cell.bytes) +
                                              " bytes: " + answer.reason);
          }
        }
      }
    }
    std::vector<Row> rows;
    for (const std::string& library : libraries_) {
      for (const std::string& memory : memories_of(library)) {
        Cell own = cell;
        own.memory = memory;
        // Gloo has nothing else, within a host too.
        rows.push_back(bench::summarize(library, own, ranks,
                                        library == "gloo" ? "tcp" : options_.field.transport,
                                        figures[{library, memory}]));
        rows.back().no_figures = reasons[library];
        rows.back().engine = library == "muster" && engine_;
        rows.back().threads = library == "muster" && options_.field.threads;
      }
    }
    bench::compare(rows);
    progress_.clear();
    std::printf("%s", bench::table_lines(rows).c_str());
    std::fflush(stdout);
    for (const auto& [library, reason] : reasons) tell(library, reason);
    rows_.insert(rows_.end(), rows.begin(), rows.end());
    return {};
  }

  const std::vector<std::string>& memories_of(const std::string& library) const {
    static const std::vector<std::string> others = {"private"};
    return library == "muster" ? options_.memories : others;
  }

  /// Once.
  void tell(const std::string& library, const std::string& reason) {
    if (!reason.empty() && told_.insert(library + reason).second)
      std::fprintf(stderr, "%s: %s\n", library.c_str(), reason.c_str());
  }

  Status write_files() const {
    const FileSizeSignalBlock block;
    if (!options_.json.empty()) {
      std::ofstream file(options_.json, std::ios::app);
      for (const Row& row : rows_) {
        if (row.figures.iterations > 0) file << bench::json(row) << "\n";
      }
      if (!file) return Status(Code::invalid_argument, "cannot write " + options_.json);
    }
    if (!options_.picture.empty()) {
      std::ofstream file(options_.picture);
      file << bench::plot(rows_);
      if (!file) return Status(Code::invalid_argument, "cannot write " + options_.picture);
    }
    return {};
  }

  const BenchOptions& options_;
  std::vector<std::string> libraries_;
  ProgressLine progress_;
  std::vector<Row> rows_;
  std::set<std::string> told_;
  bool engine_ = false;  // what is timed of muster is the engine alone
};

void add_options(CLI::App& app, BenchOptions& options) {
  app.add_option("--op", options.ops, "operations, comma separated")
      ->delimiter(',')
      ->check(CLI::IsMember(kOps))
      ->capture_default_str();
  app.add_option("--sizes,--bytes", options.sizes,
                 "bytes, comma separated; 64KiB and 1MiB are understood")
      ->delimiter(',')
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  app.add_option("--ranks", options.ranks, "numbers of ranks, comma separated")
      ->delimiter(',')
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  app.add_option("--vs", options.rivals,
                 "other libraries in the same run, in turn with muster: gloo, openmpi, mpich, impi")
      ->delimiter(',')
      ->check(CLI::IsMember(bench::known_rivals()));
  app.add_option("--dtype", options.dtype, "element type, as torch calls it")
      ->check(CLI::IsMember(dtype_names()))
      ->capture_default_str();
  app.add_option("--transport", options.field.transport,
                 "shm, or auto (what muster takes between ranks of a host: shm), or tcp")
      ->transform(CLI::Transformer(kTransports))
      ->check(CLI::IsMember({"shm", "tcp"}))
      ->capture_default_str();
  app.add_option(
         "--memory", options.memories,
         "of muster's ranks, comma separated, each beside one measurement of the others: private, "
         "arena or shared (both: shared "
         "between the ranks of a host), or allocator (ordinary tensors, with the shared allocator)")
      ->delimiter(',')
      ->transform(CLI::Transformer(kMemories))
      ->check(CLI::IsMember({"private", "arena", "allocator"}))
      ->capture_default_str();
  app.add_flag("--threads", options.field.threads, "muster's ranks as threads of one process");
  app.add_flag("!--engine", options.field.tensors,
               "time the engine below the tensors, without recorder and validation");
  app.add_option("--seconds", options.seconds, "time of the loops of one cell")
      ->check(CLI::Range(0.01, 60.0))
      ->capture_default_str();
  app.add_option("--rounds", options.rounds,
                 "how often everything is repeated; medians are shown, by --tune the least. "
                 "Default 3 with --vs, --tune and "
                 "--check-selection, else 1")
      ->check(CLI::Range(1, 100));
  app.add_option("--json", options.json,
                 "also append the rows to this file, one JSON object a line");
  app.add_option("--plot", options.picture, "also draw them into this SVG file");
}

void add_selection_options(CLI::App& app, BenchOptions& options) {
  const std::string group = "Which algorithm runs";
  auto* tune = app.add_option("--tune", options.tuning,
                              "measure from which size on which algorithm is faster and write it "
                              "to this file, or where groups look for it: "
                              "MUSTER_TUNING, else ~/.config/muster/tuning. Quiet machine!")
                   ->expected(0, 1)
                   ->group(group);
  auto* check = app.add_flag("--check-selection", options.check_selection,
                             "measure every algorithm of muster's and fail where the selected one "
                             "is slower than another by more than 10 %; takes "
                             "longer where that is not clear at once")
                    ->group(group)
                    ->excludes(tune);
  auto* simulate =
      app.add_flag(
             "--simulate", options.simulate,
             "predict times over links from a model, for any number of ranks; nothing is measured")
          ->group(group)
          ->excludes(tune)
          ->excludes(check);
  bench::Simulation& model = options.simulation;
  const std::string parts = "The model of --simulate";
  auto* hosts = app.add_option("--hosts", model.hosts,
                               "hosts, with equally many ranks; default: one for each rank");
  auto* per_host =
      app.add_option("--ranks-per-host", model.ranks_per_host,
                     "ranks that share a host and its network; the last host has what is left");
  for (auto* option : {hosts, per_host})
    option->check(CLI::Range(1, 10'000'000))->group(parts)->needs(simulate);
  hosts->excludes(per_host);
  const auto figure = [&](const char* name, double& value, double unit, const char* what) {
    app.add_option_function<double>(
           name, [&value, unit](const double& given) { value = given * unit; }, what)
        ->check(above_zero())
        ->group(parts)
        ->needs(simulate);
  };
  figure("--latency-us", model.machine.latency, 1e-6, "between two hosts; default 15");
  figure("--host-latency-us", model.machine.host_latency, 1e-6, "within a host; default 3");
  figure("--overhead-us", model.machine.overhead, 1e-6,
         "of every message, at each end; default 1.5");
  figure("--bandwidth-gbs", model.machine.bandwidth, 1e9,
         "of a host's network, gigabytes a second each way; default 3");
  figure("--host-bandwidth-gbs", model.machine.host_bandwidth, 1e9,
         "between two ranks of a host; default 4");
  figure("--reduction-gbs", model.machine.reduction, 1e9, "at which bytes are added up; default 8");
}

/// What was not said is chosen so that the borders between algorithms show.
bench::Contest contest_of(const CLI::App& app, const BenchOptions& options) {
  bench::Contest contest;
  contest.ops = options.p2p || app.count("--op") > 0 ? options.ops : kOps;
  contest.sizes = options.sizes;
  if (app.count("--sizes") == 0)
    contest.sizes = {64,    1024,   4096,   8192,    16384,   32768,
                     65536, 131072, 262144, 1048576, 4194304, 16777216};
  std::sort(contest.sizes.begin(), contest.sizes.end());
  contest.sizes.erase(std::unique(contest.sizes.begin(), contest.sizes.end()), contest.sizes.end());
  contest.ranks = app.count("--ranks") > 0 ? options.ranks : std::vector<int>{2, 4};
  contest.transports = app.count("--transport") > 0
                           ? std::vector<std::string>{options.field.transport}
                           : std::vector<std::string>{"shm", "tcp"};
  contest.dtype = options.dtype;
  contest.memory = options.memories.front();
  contest.seconds = app.count("--seconds") > 0 ? options.seconds : 0.05;
  if (options.rounds > 0) contest.rounds = options.rounds;
  contest.threads = options.field.threads;
  return contest;
}

Status tune(const CLI::App& app, const BenchOptions& options) {
  const std::string path = options.tuning.empty() ? tuning_path() : options.tuning;
  if (path.empty())
    return Status(Code::invalid_argument,
                  "there is no place for the tuning file here; say one: --tune FILE");
  return bench::tune(contest_of(app, options), path);
}

Status simulate(const CLI::App& app, BenchOptions options) {
  if (app.count("--ranks") == 0) options.ranks = {2, 8, 64, 1024, 100'000};
  if (const int hosts = options.simulation.hosts; app.count("--ranks") == 0 && hosts > 0)
    options.ranks = {hosts, 2 * hosts, 8 * hosts, 64 * hosts};
  options.simulation.ops = options.ops;
  options.simulation.sizes = options.sizes;
  options.simulation.ranks = options.ranks;
  options.simulation.json = options.json;
  return bench::simulate(options.simulation);
}

/// Of options that are fine by themselves; empty where there is none.
std::string contradiction(const CLI::App& app, const BenchOptions& options) {
  if (options.simulate) return {};
  if (*std::max_element(options.ranks.begin(), options.ranks.end()) > 128)
    return "at most 128 ranks can be started here; --simulate predicts larger groups";
  if ((app.count("--tune") > 0 || options.check_selection) && options.memories.size() > 1)
    return "--tune and --check-selection take one --memory: what is selected does not depend on it";
  return {};
}

Status measure(const CLI::App& app, const BenchOptions& options) {
  if (options.simulate) return simulate(app, options);
  if (app.count("--tune") > 0) return tune(app, options);
  if (options.check_selection) return bench::check_selection(contest_of(app, options));
  return Run(options).play();
}

/// Only where that cannot be done it returns.
int become(const std::vector<std::string>& words) {
  std::vector<char*> pointers;
  pointers.reserve(words.size() + 1);
  for (const std::string& word : words) pointers.push_back(const_cast<char*>(word.data()));
  pointers.push_back(nullptr);
  ::execvp(pointers[0], pointers.data());
  return 127;
}

/// Becomes `program` beside this one, which needs torch; this one is free of it.
int become_program(const std::string& name, const std::vector<std::string>& arguments) {
  std::vector<std::string> words{bench::program_beside(name)};
  words.insert(words.end(), arguments.begin(), arguments.end());
  const int failed = become(words);
  std::fprintf(stderr,
               "muster bench: %s is not there; it is built with the half of muster that needs "
               "torch (make build)\n",
               words[0].c_str());
  return failed;
}

int become_script(const std::string& file, const std::vector<std::string>& arguments) {
  const auto plan = bench::plan_script(file, arguments);
  if (!plan) {
    std::fprintf(stderr, "muster bench: %s\n", plan.status().message().c_str());
    return 1;
  }
  for (const auto& [name, value] : plan->environment) ::setenv(name.c_str(), value.c_str(), 1);
  return become(plan->command);
}

}  // namespace

int run_bench(const std::vector<std::string>& arguments) {
  const std::string first = arguments.empty() ? "" : arguments.front();
  if (first == "ddp" || first == "rpc" || first == "floors")
    return become_program("muster_bench_" + first, {arguments.begin() + 1, arguments.end()});
  if (first == "store" || first == "group" || first == "launch" || first == "idle")
    return become_program("muster_bench_services", arguments);
  const std::map<std::string, const char*> scripts{{"python", "python_calls.py"},
                                                   {"fsdp", "fsdp_steps.py"},
                                                   {"checkpoint", "checkpoint_speed.py"}};
  if (const auto script = scripts.find(first); script != scripts.end())
    return become_script(script->second, {arguments.begin() + 1, arguments.end()});
  if (first == "hosts") {
    std::vector<std::string> words{"--worker", bench::program_beside("muster_bench_worker")};
    words.insert(words.end(), arguments.begin() + 1, arguments.end());
    return become_script("hosts.py", words);
  }
  BenchOptions options;
  options.p2p = first == "p2p";
  if (options.p2p) options.ops = {"ping_pong"};
  const bool on_mpi = first == "mpi";
  if (on_mpi) {
    options.field.transport = "mpi";
    options.rivals = {"openmpi"};
    options.ops = {"all_reduce", "broadcast", "all_gather", "ping_pong", "barrier"};
  }
  CLI::App app(
      "Times muster's collectives between processes of this machine, alone or against other "
      "libraries in the same run.\n"
      "Every rank rewrites its buffer before each call. loop: back to back, rewrite included, "
      "until the last rank is through, median of 11 "
      "loops (3, and 3 calls for p50,\n"
      "of a library whose one call takes five times as long as all loops were to).\n"
      "p50: one call after a barrier, from the last rank's start to the last rank's end. "
      "Microseconds.\n"
      "Libraries are compared by p50 from 64 KiB up and by loop below; a ratio below 1 is faster "
      "than the best rival.\n"
      "Which algorithm runs at which size: --tune, --check-selection, --simulate.\n"
      "Instead of collectives: muster bench p2p (a message there and back, with the options "
      "below), mpi (backend mpi beside a plain program on the MPI that --vs names), ddp (training "
      "steps), fsdp (memory of sharded training against the plan), checkpoint (saving and loading "
      "of a sharded model), rpc (remote calls), python (calls from Python), hosts (between hosts, "
      "against what their links allow; network namespaces, as root, or a list of hosts), store, "
      "group, launch, idle, floors (what the "
      "machine "
      "itself takes); these with --help.",
      "muster bench");
  add_options(app, options);
  add_selection_options(app, options);
  const int named = options.p2p || on_mpi ? 1 : 0;
  if (const auto stop = parse(app, {arguments.begin() + named, arguments.end()})) return *stop;
  if (on_mpi) {
    const auto mpi = std::ranges::find_if(options.rivals,
                                          [](const std::string& rival) { return rival != "gloo"; });
    options.field.mpi = mpi == options.rivals.end() ? "" : *mpi;
  }
  if (const std::string why = contradiction(app, options); !why.empty()) {
    std::fprintf(stderr, "muster bench: %s\n", why.c_str());
    return kUsageError;
  }
  const Status played = measure(app, options);
  if (!played) std::fprintf(stderr, "muster bench: %s\n", played.message().c_str());
  return played ? 0 : 1;
}

}  // namespace muster::cli
