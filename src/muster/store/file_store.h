/// A store in a file. Private to `store/`: the rendezvous builds on more than the factory shows.
#pragma once

#include <functional>
#include <memory>

#include "muster/store/file_log.h"
#include "muster/store/store.h"

namespace muster::store {

/// The store over an open file. `goodbye` runs when the last clone is gone, unless the process is a
/// forked child's copy.
std::shared_ptr<Store> make_file_store_over(std::shared_ptr<FileLog> log, Duration timeout,
                                            std::function<void(FileLog&)> goodbye);

/// Keys of the file that are no user's keys begin with this; users' begin with 'k', meetings' with
/// 'b', 'g', 'v' and 'o', queues' with 'q'.
inline constexpr char kFileOwnKey = 'm';

/// How long the last words of a process that leaves may wait for the file.
inline constexpr Duration kFileGoodbyeLimit = std::chrono::seconds(5);

}  // namespace muster::store
