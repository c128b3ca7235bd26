// SPDX-License-Identifier: BSD-3-Clause
// PMIx, through libpmix as it is found when the program runs: a program that mpirun has not started
// does without it.

#include "core/rendezvous/launch_exchange.h"

#ifdef MUSTER_PMIX
#include <dlfcn.h>
#include <pmix.h>

#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>

namespace muster::store {
namespace {

/// The functions of libpmix and this process's name in its job.
struct Pmix {
  decltype(&PMIx_Init) init;
  decltype(&PMIx_Put) put;
  decltype(&PMIx_Commit) commit;
  decltype(&PMIx_Fence_nb) fence;
  decltype(&PMIx_Get) get;
  decltype(&PMIx_Finalize) finalize;
  pmix_proc_t self{};
};

Status failed(const std::string& what, pmix_status_t status) {
  return Status(Code::network, "PMIx: " + what + " failed with status " + std::to_string(status) +
                                   "; set MASTER_ADDR and MASTER_PORT instead");
}

Result<const Pmix*> pmix_of_process() {
  static Pmix pmix;
  static bool begun = false;
  if (begun) return &pmix;
  // Its plugins look for its symbols in the whole process.
  void* library = ::dlopen("libpmix.so.2", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr)
    return Status(Code::unsupported, std::string("libpmix cannot be loaded (") + ::dlerror() +
                                         "); set MASTER_ADDR and MASTER_PORT instead");
  const auto find = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
  if (!find(pmix.init, "PMIx_Init") || !find(pmix.put, "PMIx_Put") ||
      !find(pmix.commit, "PMIx_Commit") || !find(pmix.fence, "PMIx_Fence_nb") ||
      !find(pmix.get, "PMIx_Get") || !find(pmix.finalize, "PMIx_Finalize"))
    return Status(Code::unsupported,
                  "libpmix.so.2 lacks a function; set MASTER_ADDR and MASTER_PORT instead");
  if (const auto status = pmix.init(&pmix.self, nullptr, 0); status != PMIX_SUCCESS)
    return failed("PMIx_Init", status);
  begun = true;
  std::atexit([] { pmix.finalize(nullptr, 0); });
  return &pmix;
}

/// Shared with the callback of libpmix's thread, which may outlive the wait.
struct Fence {
  std::mutex mutex;  // guards all below
  std::condition_variable changed;
  bool done = false;
  pmix_status_t status = PMIX_SUCCESS;
};

/// Waits until all ranks of the job have committed what they have put.
Status fence(const Pmix& pmix, TimePoint deadline) {
  pmix_info_t collect{};
  std::strncpy(collect.key, PMIX_COLLECT_DATA, sizeof collect.key - 1);
  collect.value.type = PMIX_BOOL;
  collect.value.data.flag = true;
  // The callback may come after this call has given up.
  auto shared = std::make_shared<Fence>();
  auto* handle = new std::shared_ptr<Fence>(shared);
  const auto on_done = [](pmix_status_t status, void* data) {
    const std::unique_ptr<std::shared_ptr<Fence>> mine(static_cast<std::shared_ptr<Fence>*>(data));
    const std::lock_guard lock((*mine)->mutex);
    (*mine)->done = true;
    (*mine)->status = status;
    (*mine)->changed.notify_all();
  };
  const auto begun = pmix.fence(nullptr, 0, &collect, 1, on_done, handle);
  if (begun != PMIX_SUCCESS) {
    delete handle;
    return begun == PMIX_OPERATION_SUCCEEDED ? Status() : failed("PMIx_Fence", begun);
  }
  std::unique_lock lock(shared->mutex);
  const auto done = [&] { return shared->done; };
  if (deadline == TimePoint::max()) {
    shared->changed.wait(lock, done);
  } else if (!shared->changed.wait_until(lock, deadline, done)) {
    return Status(Code::timed_out,
                  "not all ranks that mpirun has started came to the exchange of addresses by PMIx "
                  "in time");
  }
  return shared->status == PMIX_SUCCESS ? Status() : failed("PMIx_Fence", shared->status);
}

}  // namespace

Result<std::string> exchange_detail::share_by_pmix(int rank, std::string_view text,
                                                   TimePoint deadline) {
  const auto pmix = pmix_of_process();
  if (!pmix) return pmix.status();
  const std::string key = next_key();
  std::string mine(text);
  if (rank == 0) {
    pmix_value_t value{};
    value.type = PMIX_STRING;
    value.data.string = mine.data();
    if (const auto status = (*pmix)->put(PMIX_GLOBAL, key.c_str(), &value); status != PMIX_SUCCESS)
      return failed("PMIx_Put", status);
    if (const auto status = (*pmix)->commit(); status != PMIX_SUCCESS)
      return failed("PMIx_Commit", status);
  }
  if (Status all = fence(**pmix, deadline); !all) return all;
  if (rank == 0) return mine;
  pmix_proc_t zero = (*pmix)->self;
  zero.rank = 0;
  pmix_value_t* value = nullptr;
  if (const auto status = (*pmix)->get(&zero, key.c_str(), nullptr, 0, &value);
      status != PMIX_SUCCESS)
    return failed("PMIx_Get", status);
  std::string got =
      value->type == PMIX_STRING && value->data.string != nullptr ? value->data.string : "";
  if (value->type == PMIX_STRING) std::free(value->data.string);
  std::free(value);
  return got;
}

}  // namespace muster::store

#else

namespace muster::store {

Result<std::string> exchange_detail::share_by_pmix(int, std::string_view, TimePoint) {
  return Status(Code::unsupported,
                "this muster was built without PMIx (libpmix-dev); set MASTER_ADDR to the name of "
                "the host on which rank 0 runs, and MASTER_PORT to a free port there, the same on "
                "all ranks");
}

}  // namespace muster::store

#endif
