/// Small messages that travel together.
#pragma once

namespace muster::transport {

class Fabric;

/// A stretch of one thread's work (`Fabric::together`). While it lives, small messages (to 4 KiB)
/// that the thread sends on the fabric's channels are copied into their links' buffers, and each
/// link writes what stands there at once: when the stretch ends, before the thread polls the fabric
/// or waits in it, or as soon as 32 KiB are there. Such a send is done once it has been copied; a
/// link that breaks before it is written fails the channel, as one does that breaks while the
/// kernel still holds the bytes. Order is kept: whatever else is sent to the same peer, larger
/// messages and those of other threads, goes at once and takes along what stands before it.
///
/// It costs next to nothing where nothing small is sent, and nothing within another of the same
/// fabric and thread. Peers wait for what stands in the buffers, so it is no place for long work.
/// It ends on its thread, and before the fabric.
class Together {
 public:
  explicit Together(Fabric& fabric);
  ~Together();
  Together(const Together&) = delete;
  Together& operator=(const Together&) = delete;

  // For the fabric.
  /// This thread's; null where it has none.
  static Together* of(const Fabric& fabric);
  /// Something stands in a buffer.
  void note() { gathered_ = true; }
  /// Writes what has been gathered until now.
  void write();

  /// Around a wait: what this thread has gathered is written, and what it sends meanwhile goes at
  /// once. Whoever runs on this thread meanwhile (simulated ranks do) may have stretches of their
  /// own.
  class Aside {
   public:
    Aside();
    ~Aside();
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;

   private:
    Together* const kept_;
  };

 private:
  Fabric& fabric_;
  const bool inner_;
  Together* outer_ = nullptr;
  bool gathered_ = false;
};

}  // namespace muster::transport
