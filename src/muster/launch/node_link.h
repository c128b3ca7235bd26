/// What the agents of a job's nodes tell each other while it runs: a failure to all, the end to the one that serves the store.
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

/// Every node has a queue in the store; one thread waits on ours and says every few seconds that we live. A node that falls silent, or the
/// store itself, is reported as failed.
class NodeLink {
 public:
  static Result<std::unique_ptr<NodeLink>> open(const NodeJob& job);
  ~NodeLink();

  /// Readable when `take` has something.
  int descriptor() const { return event_.get(); }
  std::vector<AgentEvent> take();
  /// Best effort, at most a few seconds.
  void tell_failed(int exit_code, const std::string& text);
  void tell_ended();

 private:
  explicit NodeLink(const NodeJob& job) : job_(job) {}
  std::string inbox(int node) const { return job_.key_prefix + "inbox/" + std::to_string(node); }
  void run();
  void receive(const std::string& message);
  void check_silence();
  void give(AgentEvent event);

  NodeJob job_;
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
