// SPDX-License-Identifier: BSD-3-Clause
/// A store in a file. Private to `store/`; the rendezvous needs more than the factory offers.
#pragma once

#include <functional>
#include <memory>

#include "core/store/file/file_log.h"
#include "muster/key_value_store.h"

namespace muster::store {

/// Makes a store on an open file. `on_last_release` runs when the last clone is destroyed, except
/// in a forked child.
std::shared_ptr<Store> make_file_store_over(std::shared_ptr<FileLog> log, Duration timeout,
                                            std::function<void(FileLog&)> on_last_release);

/// Prefix of keys in the file that are not user keys. User keys begin with 'k', meetings with 'b',
/// 'g', 'v' and 'o', queues with 'q'.
inline constexpr char kFileOwnKey = 'm';

/// Time limit for a leaving process's last transaction.
inline constexpr Duration kFileGoodbyeLimit = std::chrono::seconds(5);

}  // namespace muster::store
