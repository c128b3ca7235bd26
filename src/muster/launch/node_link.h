/// What the agents of a job's nodes tell each other while it runs: a failure to all, the end to the
/// one that serves the store.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "muster/base/descriptor.h"
#include "muster/launch/agent_machine.h"
#include "muster/launch/node_rendezvous.h"

namespace muster::launch {

struct NodeLinkLimits {
  Duration beat = std::chrono::seconds(5);  ///< how often a node says that it lives
  Duration silence =
      std::chrono::seconds(60);             ///< after which a node, or the store, is taken for dead
  Duration tell = std::chrono::seconds(5);  ///< for a message to another node
};

/// Every node has a queue in the store; one thread waits on ours and says every few seconds that we
/// live. A node that falls silent, or the store itself, is reported as failed.
class NodeLink {
 public:
  static Result<std::unique_ptr<NodeLink>> open(const NodeJob& job,
                                                const NodeLinkLimits& limits = {});
  ~NodeLink();

  /// Readable when `take` has something.
  int descriptor() const { return event_.get(); }
  std::vector<AgentEvent> take();
  /// Best effort, at most a few seconds.
  void tell_failed(int exit_code, const std::string& text);
  void tell_ended();

 private:
  NodeLink(const NodeJob& job, const NodeLinkLimits& limits) : job_(job), limits_(limits) {}
  std::string inbox(int node) const { return job_.key_prefix + "inbox/" + std::to_string(node); }
  void run();
  void receive(const std::string& message);
  void check_silence();
  void lose_store(const std::string& why);
  void give(AgentEvent event);

  NodeJob job_;
  const NodeLinkLimits limits_;
  std::shared_ptr<store::Store> own_;  // the thread's connection
  Descriptor event_;
  std::atomic<bool> stop_ = false;
  std::atomic<bool> store_gone_ = false;  // then nobody can be told anything
  std::map<int, TimePoint> heard_;        // the thread's; nodes that have not ended
  std::mutex mutex_;
  std::vector<AgentEvent> events_;
  std::thread thread_;
};

}  // namespace muster::launch
