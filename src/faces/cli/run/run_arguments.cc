// SPDX-License-Identifier: BSD-3-Clause
// `muster run` and `muster launch`: from words to RunOptions.
#include "faces/cli/commands.h"

#include <CLI/CLI.hpp>
#include <algorithm>
#include <iostream>
#include <memory>

#include "core/base/environment.h"
#include "core/base/log/log_file.h"
#include "faces/cli/metrics/metrics.h"
#include "faces/cli/parse.h"
#include "faces/cli/run/binding.h"
#include "faces/cli/run/rendezvous_conf.h"
#include "faces/cli/run/run_config.h"
#include "faces/cli/run/run_hosts.h"
#include "faces/cli/run/run_join.h"
#include "faces/cli/run/run_words.h"
#include "faces/cli/tree/command_text.h"
#include "jobs/launch/launcher.h"
#include "jobs/launch/options.h"

namespace muster::cli {
namespace {

using launch::RunOptions;

constexpr int kWorkersElsewhere = 1 << 16;  // as many as there can be

enum class RunFlavour { run, launch };  ///< torchrun's options, torch.distributed.launch's

/// The parsed command line: options to run with, or text to print and an exit code.
struct ParsedRun {
  RunOptions options;
  std::optional<SocketAddress> metrics;  ///< to be served there
  std::optional<std::string> log_format, log_file;
  std::vector<launch::JobHost> hosts;  ///< machines to start the nodes on; none: this one
  bool finished = false;               ///< print `text` and leave with `exit_code`
  int exit_code = 0;
  std::string text;
};

// Text as it stood on the command line, before it is understood.
struct Words {
  std::string nodes = "1", workers = "1", node_rank, master_addr, master_port, run_id, backend,
              endpoint, configuration, local_addr, line_prefix, stop_signals, event_handler, events,
              metrics, log_format, log_file, config, bind_to = "none", numa_binding;
  std::string elastic, on_lost_state, spares = "0", preempt_grace = "30", repair_timeout = "0";
  std::string restarts = "0", shutdown_timeout, join_timeout = "600", monitor_interval;
  std::string log_dir, redirects = "0", tee = "0", shown_ranks, role = "default", spelling = "dash",
                       start_method;
  bool standalone = false, module = false, no_python = false, run_path = false, use_env = false,
       no_agent_store = false, replace_gloo = false;
  HostWords hosts;
  JoinWords join;
};

class Parser {
 public:
  explicit Parser(RunFlavour flavour);
  /// `arguments` without the program's and the subcommand's name. The first word that is no option
  /// is the program; all after it is the program's, untouched. Dashes in option names may be
  /// underscores. Numbers of cores and GPUs are resolved here.
  ParsedRun parse(const std::vector<std::string>& arguments);
  const std::shared_ptr<CLI::App>& app() const { return app_; }
  /// Starts the job on other machines.
  int run_on(const ParsedRun& parsed) const {
    return run_on_hosts(*app_, words_.hosts, parsed.hosts, parsed.options);
  }

 private:
  CLI::Option* value(const std::string& names, std::string& word, const std::string& what);
  CLI::Option* flag(const std::string& names, bool& word, const std::string& what) {
    return app_->add_flag(spellings(names), word, what)->group(group_);
  }
  void add_job();
  void add_hosts();
  void add_join();
  void add_watching();
  void add_output();
  void add_program();
  Status take(ParsedRun& parsed);
  Result<std::vector<launch::JobHost>> take_hosts();
  Status understand(RunOptions& options) const;
  Status understand_job(RunOptions& options) const;
  Status understand_watching(RunOptions& options) const;
  Status understand_output(RunOptions& options) const;

  RunFlavour flavour_;
  std::shared_ptr<CLI::App> app_;
  std::string group_;  // of the options that are added, in the help
  Words words_;
};

CLI::Option* Parser::value(const std::string& names, std::string& word, const std::string& what) {
  CLI::Option* option = app_->add_option(spellings(names), word, what)
                            ->group(group_)
                            ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  // torchrun's variables: PET_NPROC_PER_NODE and so on.
  std::string variable = "PET_" + option->get_lnames().front();
  for (char& letter : variable)
    letter =
        letter == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(letter)));
  return option->envname(variable)->expected(1);
}

Parser::Parser(RunFlavour flavour) : flavour_(flavour) {
  const bool run = flavour == RunFlavour::run;
  app_ = make_app(run ? "muster run" : "muster launch",
                  run ? "Starts N copies of a program as the ranks of one job, watches them and "
                        "ends them together."
                      : "Like `muster run`, with torch.distributed.launch's options; passes "
                        "--local-rank=N to the program unless --use-env.");
  app_->prefix_command();
  add_job();
  if (run) add_hosts();
  add_watching();
  add_output();
  add_program();
  app_->footer(
      "The program sees RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT and the rest in its "
      "environment; see docs/user/launching.md.\n"
      "Option names may be written with underscores. Every option with a value can also be set as "
      "PET_<NAME> in the environment.\n"
      "Exit code: 0 when all ranks succeed, else that of the rank that failed first (128 + N where "
      "signal N ended it).");
}

void Parser::add_job() {
  group_ = "Nodes and ranks";
  flag("--standalone", words_.standalone,
       "One node, no address needed: the store takes a free port");
  value(
      "--nnodes,--nnode", words_.nodes,
      "Number of nodes, N or MIN:MAX: with MIN the job begins or goes on, up to MAX may join while "
      "it runs. Default 1");
  if (const auto workers = env_text("PET_N_PROC_PER_NODE"))
    words_.workers = *workers;  // as Kubeflow's PyTorchJob spells it
  value("-n,--nproc-per-node", words_.workers,
        "Workers on this node: a number, cpu (one per core allowed to us), gpu (one per GPU) or "
        "auto; also -np, as mpirun has it. Default 1");
  value("--bind-to", words_.bind_to,
        "core: each worker runs on cores of its own, the node's divided by the workers; numa: on "
        "those of a NUMA node; OMP_NUM_THREADS becomes their number. Default none")
      ->type_name(offered("none,core,numa"));
  if (flavour_ == RunFlavour::run)
    value("--numa-binding", words_.numa_binding,
          "torchrun's: node is --bind-to numa, exclusive is --bind-to core")
        ->type_name(offered("node,exclusive"));
  value("--node-rank", words_.node_rank,
        "Number of this node, 0 to nnodes - 1. Default 0 with one node, assigned by c10d");
  value("--master-addr", words_.master_addr,
        "Host name or address of node 0, where its launcher serves the job's store. Default " +
            std::string(flavour_ == RunFlavour::run
                            ? "with one node: this host's full name where it leads here"
                            : "127.0.0.1"));
  value("--master-port", words_.master_port,
        "Port of the store. Default 29500 with several nodes, a free one with one node, as is 0");
  if (flavour_ == RunFlavour::launch) return;
  value("--rdzv-id", words_.run_id,
        "Name of the job, the same on all nodes. Default: random with --standalone, else none");
  value("--rdzv-backend", words_.backend,
        "static (nodes are numbered by --node-rank), c10d, etcd or kubernetes (first come, first "
        "numbered). Default static")
      ->type_name(offered("static,c10d,etcd,kubernetes"));
  value(
      "--rdzv-endpoint", words_.endpoint,
      "HOST[:PORT] where the nodes meet; default port 29500 (static), 29400 (c10d). etcd: some or "
      "all members, separated by commas; default port 2379. kubernetes: the API server, "
      "https://HOST:PORT; default the pod's");
  value("--rdzv-conf", words_.configuration,
        "KEY=VALUE,...; in seconds join_timeout (600), last_call_timeout (30: for more than MIN "
        "nodes, at the beginning), keep_alive_interval (5) times keep_alive_max_attempt (3): how "
        "long a node may be silent (without them 2.5, or 20 if its loss ends the job), "
        "service_timeout (60, or the repair timeout): how long workers go on while the place where "
        "nodes meet is silent, stopped_timeout (60): with --elastic keep, how long the others wait "
        "for a worker that is stopped, "
        "blacklist_cooldown (60) after blacklist_after troubles of a host (0: never); majority=1: "
        "go on only with more than half of the nodes");
  if (flavour_ == RunFlavour::run) add_join();
  value("--local-addr", words_.local_addr,
        "Address of this node to listen at and to tell the others");
}

/// In the group of the options before.
void Parser::add_join() {
  value("--join", words_.join.token,
        "The token that the job's first node has printed, and instead of all that says where the "
        "nodes meet; -: it is the first line of standard input");
  flag("--print-join", words_.join.print,
       "With --nnodes alone, be the first node and print the line by which the others come, though "
       "standard error is no terminal: the token in it lets a node into the job");
}

void Parser::add_hosts() {
  group_ = "Other machines";
  add_host_options(*app_, group_, words_.hosts,
                   [this](const std::string& names, std::string& word, const std::string& what) {
                     value(names, word, what);
                   });
}

void Parser::add_watching() {
  group_ = "Failures and elastic jobs";
  if (flavour_ == RunFlavour::run) {
    value("--max-restarts", words_.restarts,
          "After a failure start all workers of all nodes again, at most this often. Default 0");
    value("--elastic", words_.elastic,
          "restart: every epoch starts all workers anew; keep: workers stay, and only those that "
          "ended are replaced (docs/user/elastic-keep.md). Default restart")
        ->type_name(offered("restart,keep"));
    value(
        "--on-lost-state", words_.on_lost_state,
        "With --elastic keep, when no rank has the job's state any more: restart: training begins "
        "with what the program loads itself; fail: the job ends. Default restart")
        ->type_name(offered("restart,fail"));
    value("--spares", words_.spares,
          "With --elastic keep, idle processes on this node that replace workers. Default 0");
    value("--preempt-grace", words_.preempt_grace,
          "With --elastic keep, seconds for the workers to leave after their next commit when this "
          "launcher gets SIGTERM or SIGUSR1; 0: they get the signal at once. Default 30");
    value("--repair-timeout", words_.repair_timeout,
          "Seconds that a job of MIN to MAX nodes which has lost one waits for another before it "
          "goes on with fewer. Default 0");
    value("--monitor-interval", words_.monitor_interval,
          "Seconds; accepted for torchrun's sake, a worker's end is seen at once");
    value("--start-method", words_.start_method,
          "spawn, fork or forkserver; accepted for torchrun's sake, programs are always executed")
        ->type_name(offered("spawn,fork,forkserver"));
    value("--role", words_.role,
          "Name of this node's kind of workers (ROLE_NAME, ROLE_RANK). Default \"default\"");
    value("--signals-to-handle", words_.stop_signals,
          "Signals that end the job, after they were passed on to the workers. Default "
          "SIGTERM,SIGINT,SIGHUP,SIGQUIT; SIGUSR1 and SIGUSR2 are only passed on if they are not "
          "here");
    value("--event-log-handler", words_.event_handler,
          "null, or console: what happens to the job as JSON lines on standard error. Default null")
        ->type_name(offered("null,console"));
  }
  value("--shutdown-timeout", words_.shutdown_timeout,
        "Seconds between SIGTERM and SIGKILL when workers are to end. Default "
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT, else 30");
  value("--join-timeout", words_.join_timeout, "Seconds to wait for all nodes. Default 600");
  flag("--no-agent-store", words_.no_agent_store,
       "Serve no store: rank 0 opens one at MASTER_PORT itself (programs of stock torch)");
}

void Parser::add_output() {
  group_ = "Output";
  value("--events", words_.events,
        "A file to which what happens to the job is added, as JSON lines");
  value("--log-format", words_.log_format,
        "text, or json: each line of the launcher's and the ranks' log is an object with time, "
        "level, host, pid, rank and message. Default text")
      ->type_name(offered("text,json"));
  value("--log-file", words_.log_file,
        "A file for these lines instead of standard error; %h in it is the host, %p the process. "
        "At 64 MiB it becomes FILE.1, and so on to FILE.5");
  value("--metrics", words_.metrics,
        "[ADDRESS:]PORT at which Prometheus can fetch the numbers of this node's ranks, by HTTP; "
        "on the loopback interface unless an address is given, which needs `muster secret "
        "--metrics` (docs/user/metrics.md)");
  value(
      "--log-line-prefix-template", words_.line_prefix,
      "What stands before each line on the console, with ${role_name}, ${local_rank}, ${rank} and "
      "${hostname}. Default '[${rank}] '");
  value("--log-dir", words_.log_dir,
        "Directory of log files: DIR/<rdzv-id>/attempt_<n>/<local rank>/{stdout,stderr}.log. "
        "Default: a new one in /tmp");
  value("-r,--redirects", words_.redirects,
        "Streams that go to log files only: 0 none, 1 stdout, 2 stderr, 3 both; or by local rank: "
        "0:3,1:2. Default 0");
  value("-t,--tee", words_.tee,
        "Streams that go to log files and to the console; as --redirects. Default 0");
  value("--local-ranks-filter", words_.shown_ranks,
        "Local ranks whose output is shown, such as 0,1. Default all");
}

void Parser::add_program() {
  group_ = "Program";
  value("--config", words_.config,
        "A file of TOML with these options, such as nproc-per-node = 4; the command line goes "
        "before it, and it before PET_<NAME>");
  flag("-m,--module", words_.module, "The program is a Python module, run by python -m");
  flag("--replace-gloo", words_.replace_gloo,
       "Run the Python program with muster as its backend gloo (also MUSTER_REPLACE_GLOO=1); see "
       "docs/user/torch-backend.md");
  flag("--no-python", words_.no_python, "Execute the program itself even if its name ends in .py");
  flag("--run-path", words_.run_path, "Accepted for torchrun's sake")->group("");
  if (flavour_ == RunFlavour::launch) {
    flag("--use-env", words_.use_env, "Do not pass --local-rank; the program reads LOCAL_RANK");
    value("--local-rank-spelling", words_.spelling,
          "dash (--local-rank=N) or underscore (--local_rank=N). Default dash")
        ->type_name(offered("dash,underscore"));
  }
}

ParsedRun Parser::parse(const std::vector<std::string>& arguments) {
  ParsedRun parsed;
  parsed.options.command = app_->get_name();
  const auto failed = [&](const std::string& message) {
    parsed.finished = true;
    parsed.exit_code = 2;
    parsed.text = app_->get_name() + ": " + message + "\nSee " + app_->get_name() + " --help.\n";
    return parsed;
  };
  // After a lone "--" everything is the program's; the library would drop that word wherever it
  // stands.
  std::vector<std::string> words = arguments;
  replace_np(*app_, words);
  try {
    app_->parse(std::vector<std::string>(words.rbegin(), words.rend()));
    if (!words_.config.empty()) {
      const auto more = words_of_config(*app_, words_.config);
      if (!more) return failed(more.status().message());
      words.insert(words.begin(), more->begin(), more->end());
      app_->parse(std::vector<std::string>(words.rbegin(), words.rend()));
    }
  } catch (const CLI::CallForHelp&) {
    parsed.finished = true;
    parsed.text = app_->help();
    return parsed;
  } catch (const CLI::ParseError& error) {
    return failed(in_words(error));
  }
  auto rest = app_->remaining();
  if (const auto reason = refusal_of(rest)) return failed(*reason);
  if (!rest.empty() && rest.front() == "--") {
    rest.erase(rest.begin());
  } else if (!rest.empty() && rest.front().starts_with("-")) {
    return failed(not_understood(*app_, rest.front()));
  }
  if (!rest.empty()) {
    parsed.options.program = rest.front();
    parsed.options.arguments.assign(rest.begin() + 1, rest.end());
  }
  const Status taken = take(parsed);
  if (taken) return parsed;
  // With a token the options may be right, and the job not be there.
  if (!was_given(*app_, "--join") || taken.code() == Code::invalid_argument)
    return failed(taken.message());
  parsed.finished = true;
  parsed.exit_code = 1;
  parsed.text = app_->get_name() + ": " + taken.message() + "\n";
  return parsed;
}

Status Parser::take(ParsedRun& parsed) {
  if (Status beside = refuse_beside_join(*app_, words_.join); !beside) return beside;
  if (wants_hosts(*app_)) {
    auto hosts = take_hosts();
    if (!hosts) return hosts.status();
    parsed.hosts = std::move(*hosts);
  } else if (Status lone = refuse_lone_words(*app_); !lone) {
    return lone;
  }
  if (Status understood = understand(parsed.options); !understood) return understood;
  if (!words_.log_format.empty() && words_.log_format != "text" && words_.log_format != "json")
    return Status(Code::invalid_argument,
                  "--log-format: \"" + words_.log_format + "\" is neither text nor json");
  if (!words_.log_format.empty()) parsed.log_format = words_.log_format;
  if (!words_.log_file.empty()) parsed.log_file = words_.log_file;
  if (words_.metrics.empty()) return {};
  auto address = parse_metrics_address(words_.metrics);
  if (!address) return address.status();
  parsed.metrics = *address;
  return {};
}

/// Leaves the words of the first node. The other machines' cores and GPUs are not known here, nor
/// is what they are bound to.
Result<std::vector<launch::JobHost>> Parser::take_hosts() {
  auto hosts = job_hosts(*app_, words_.hosts);
  if (!hosts) return hosts;
  words_.nodes = std::to_string(hosts->size());
  words_.workers = std::to_string(kWorkersElsewhere);
  words_.bind_to = "none";
  words_.numa_binding.clear();
  words_.node_rank = "0";
  if (hosts->size() == 1) return hosts;
  auto name = meeting_host(*app_, *hosts);
  if (!name) return name.status();
  words_.master_addr = *name;
  return hosts;
}

std::optional<std::string> given(const std::string& word) {
  return word.empty() ? std::nullopt : std::optional(word);
}

Status Parser::understand_job(RunOptions& options) const {
  options.standalone = words_.standalone;
  auto nodes = launch::parse_nodes(words_.nodes);
  if (!nodes) return nodes.status();
  options.min_nodes = nodes->least;
  options.nodes = nodes->most;
  auto workers = launch::parse_workers(words_.workers);
  if (!workers) return workers.status();
  options.workers = *workers;
  const auto bind_to = binding_of(words_.bind_to, words_.numa_binding);
  if (!bind_to) return bind_to.status();
  if (*bind_to != "none" && words_.spares != "0")
    return Status(
        Code::invalid_argument,
        "--bind-to and --spares: a spare process has no place before it replaces a worker");
  auto cpus = bind_workers(*bind_to, *workers);
  if (!cpus) return cpus.status();
  options.cpus = std::move(*cpus);
  if (!words_.node_rank.empty()) {
    auto rank = launch::parse_whole("--node-rank", words_.node_rank, 0, 1 << 20);
    if (!rank) return rank.status();
    options.node_rank = static_cast<int>(*rank);
  }
  if (!words_.master_port.empty()) {
    auto port = launch::parse_whole("--master-port", words_.master_port, 0, 65535);
    if (!port) return port.status();
    options.master_port = static_cast<std::uint16_t>(*port);
  }
  if (words_.backend == "c10d") {
    options.rendezvous = launch::RendezvousKind::assigned_ranks;
  } else if (words_.backend == "etcd") {
    options.rendezvous = launch::RendezvousKind::etcd;
  } else if (words_.backend == "kubernetes") {
    options.rendezvous = launch::RendezvousKind::kubernetes;
  } else if (words_.backend == "etcd-v2") {
    return Status(Code::unsupported,
                  "--rdzv-backend etcd-v2: etcd no longer speaks this version of its protocol; say "
                  "etcd, which speaks version 3");
  } else if (!words_.backend.empty() && words_.backend != "static") {
    return Status(Code::invalid_argument, "--rdzv-backend: \"" + words_.backend +
                                              "\" is none of static, c10d, etcd and kubernetes");
  }
  options.master_addr = given(words_.master_addr);
  options.run_id = given(words_.run_id);
  options.endpoint = given(words_.endpoint);
  options.local_addr = given(words_.local_addr);
  options.role = words_.role;
  options.agent_store = !words_.no_agent_store;
  return launch::take_scheduled_node(options, app_->get_option("--nnodes")->count() > 0);
}

Status Parser::understand_watching(RunOptions& options) const {
  auto restarts = launch::parse_whole("--max-restarts", words_.restarts, 0, 1 << 30);
  if (!restarts) return restarts.status();
  options.max_restarts = static_cast<int>(*restarts);
  const std::string patience = words_.shutdown_timeout.empty()
                                   ? env_text("TORCH_ELASTIC_SHUTDOWN_TIMEOUT").value_or("30")
                                   : words_.shutdown_timeout;
  auto shutdown = parse_seconds("--shutdown-timeout", patience);
  if (!shutdown) return shutdown.status();
  if (!words_.elastic.empty() && words_.elastic != "restart" && words_.elastic != "keep")
    return Status(Code::invalid_argument,
                  "--elastic: \"" + words_.elastic + "\" is neither restart nor keep");
  options.keep_workers = words_.elastic == "keep";
  const std::string& lost = words_.on_lost_state;
  if (!lost.empty() && lost != "restart" && lost != "fail")
    return Status(Code::invalid_argument,
                  "--on-lost-state: \"" + lost + "\" is neither restart nor fail");
  if (!lost.empty() && !options.keep_workers)
    return Status(Code::invalid_argument,
                  "--on-lost-state is for --elastic keep: with restart no rank keeps state");
  if (lost == "fail") options.on_lost_state = launch::OnLostState::fail;
  auto spares = launch::parse_whole("--spares", words_.spares, 0, 1 << 16);
  if (!spares) return spares.status();
  options.spares = static_cast<int>(*spares);
  auto grace = parse_seconds("--preempt-grace", words_.preempt_grace);
  if (!grace) return grace.status();
  options.preempt_grace = *grace;
  auto repair = parse_seconds("--repair-timeout", words_.repair_timeout);
  if (!repair) return repair.status();
  options.repair_timeout = *repair;
  if (!words_.stop_signals.empty()) {
    auto signals = launch::parse_signals("--signals-to-handle", words_.stop_signals);
    if (!signals) return signals.status();
    options.stop_signals = std::move(*signals);
  }
  options.shutdown_timeout = *shutdown;
  auto join = parse_seconds("--join-timeout", words_.join_timeout);
  if (!join) return join.status();
  options.join_timeout = *join;
  if (Status configured = take_rendezvous_conf(words_.configuration, options); !configured)
    return configured;
  if (words_.monitor_interval.empty()) return {};
  return parse_seconds("--monitor-interval", words_.monitor_interval).status();
}

Status Parser::understand_output(RunOptions& options) const {
  const auto prefix = env_text("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE");
  if (!words_.line_prefix.empty() || prefix)
    options.line_prefix = words_.line_prefix.empty() ? *prefix : words_.line_prefix;
  options.events = given(words_.events);
  options.events_on_console = words_.event_handler == "console";
  if (!options.events_on_console && !words_.event_handler.empty() &&
      words_.event_handler != "null" && words_.event_handler != "dynamic_rendezvous") {
    return Status(Code::unsupported,
                  "--event-log-handler: \"" + words_.event_handler +
                      "\" is neither null nor console: others are objects of a Python launcher; "
                      "--events FILE writes the same as JSON lines");
  }
  auto redirects = launch::parse_streams("--redirects", words_.redirects, options.workers);
  if (!redirects) return redirects.status();
  options.redirects = *redirects;
  auto tee = launch::parse_streams("--tee", words_.tee, options.workers);
  if (!tee) return tee.status();
  options.tee = *tee;
  options.log_dir = given(words_.log_dir);
  if (words_.shown_ranks.empty()) return {};
  auto shown = launch::parse_rank_set("--local-ranks-filter", words_.shown_ranks, options.workers);
  if (!shown) return shown.status();
  options.shown_ranks = *shown;
  return {};
}

Status Parser::understand(RunOptions& options) const {
  if (Status job = understand_job(options); !job) return job;
  if (Status watching = understand_watching(options); !watching) return watching;
  if (Status output = understand_output(options); !output) return output;
  const bool may_join = flavour_ == RunFlavour::run && !wants_hosts(*app_);
  if (Status join = may_join ? take_join(*app_, words_.join, options) : Status(); !join)
    return join;
  options.module = words_.module;
  options.no_python = words_.no_python;
  const auto replace_gloo = env_flag("MUSTER_REPLACE_GLOO");
  if (!replace_gloo) return replace_gloo.status();
  options.replace_gloo =
      words_.replace_gloo || (replace_gloo->value_or(false) && launch::is_python(options));
  if (flavour_ == RunFlavour::launch) {
    if (words_.spelling != "dash" && words_.spelling != "underscore") {
      return Status(Code::invalid_argument, "--local-rank-spelling: \"" + words_.spelling +
                                                "\" is neither dash nor underscore");
    }
    const auto spelled = words_.spelling == "dash" ? launch::LocalRankArgument::dash
                                                   : launch::LocalRankArgument::underscore;
    if (options.nodes == 1 && !options.master_addr) options.master_addr = "127.0.0.1";
    options.local_rank_argument = words_.use_env ? launch::LocalRankArgument::none : spelled;
  }
  return launch::validate(options);
}

/// The launcher and the workers, which inherit them, read the variables.
void set_log_variables(const ParsedRun& parsed) {
  if (parsed.log_format) ::setenv("MUSTER_LOG_FORMAT", parsed.log_format->c_str(), 1);
  if (parsed.log_file) ::setenv("MUSTER_LOG_FILE", log_path_from_here(*parsed.log_file).c_str(), 1);
}

int run_with_metrics(RunOptions options, const SocketAddress& address) {
  options.numbers = std::make_shared<launch::NodeNumbers>();
  const auto server = serve_metrics(address, options.numbers);
  if (!server) {
    std::cerr << options.command << ": " << server.status().message() << std::endl;
    return 1;
  }
  std::cerr << options.command << ": metrics are at " << (*server)->url() << std::endl;
  return launch::run_job(options);
}

Command command_of(RunFlavour flavour) {
  const auto parser = std::make_shared<Parser>(flavour);
  const auto run = [parser](const std::vector<std::string>& arguments) {
    const auto parsed = parser->parse(arguments);
    if (!parsed.finished && !parsed.hosts.empty()) return parser->run_on(parsed);
    if (!parsed.finished) set_log_variables(parsed);
    if (!parsed.finished) warn_of_misspelt_variables(*parser->app());
    if (!parsed.finished && parsed.metrics)
      return run_with_metrics(parsed.options, *parsed.metrics);
    if (!parsed.finished) return launch::run_job(parsed.options);
    (parsed.exit_code == 0 ? std::cout : std::cerr) << parsed.text;
    return parsed.exit_code;
  };
  return {parser->app(), run};
}

}  // namespace

Command run_command() { return command_of(RunFlavour::run); }

Command launch_command() { return command_of(RunFlavour::launch); }

}  // namespace muster::cli
