// SPDX-License-Identifier: BSD-3-Clause
#include "backends/ucc/library.h"

#include <dlfcn.h>
#include <unistd.h>

#include <bit>
#include <cstring>

#include "backends/carried/call.h"
#include "core/base/environment.h"
#include "core/base/log/log.h"

namespace muster::ucc {
namespace {

constexpr const char* kSoname = "libucc.so.1";

Result<UccLibrary*> find() {
  auto found = UccLibrary::open(env_text("MUSTER_UCC_LIBRARY").value_or(kSoname));
  if (!found) return found.status();
  return found->release();
}

}  // namespace

const Result<UccLibrary*>& UccLibrary::of_process() {
  static const auto* const found = new Result<UccLibrary*>(find());
  return *found;
}

Result<std::unique_ptr<UccLibrary>> UccLibrary::open(const std::string& path) {
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return Status(Code::unsupported,
                  "UCC's library cannot be loaded: " + std::string(::dlerror()) +
                      "; install UCC 1.9 (Debian's packages are libucc1 and libucc-dev), or name "
                      "the file in MUSTER_UCC_LIBRARY");
  std::unique_ptr<UccLibrary> library(new UccLibrary);
  for (const UccFunction& row : kUccFunctions) {
    void* const function = ::dlsym(handle, row.name);
    if (function == nullptr)
      return Status(Code::unsupported, path + " has no function " + row.name +
                                           "; name a library of UCC 1.9 in MUSTER_UCC_LIBRARY");
    std::memcpy(reinterpret_cast<char*>(&library->functions_) + row.offset, &function,
                sizeof function);
  }
  unsigned major = 0, minor = 0, release = 0;
  library->functions_.get_version(&major, &minor, &release);
  library->version_ = "UCC " + std::to_string(major) + "." + std::to_string(minor) + "." +
                      std::to_string(release) + " (" + path + ")";
  if (major != kApiMajor || minor != kApiMinor)
    return Status(Code::unsupported, library->version_ +
                                         " is of a version whose structures muster does not know; "
                                         "name a library of UCC 1.9 in MUSTER_UCC_LIBRARY");
  return library;
}

Result<UccContext*> UccLibrary::context() {
  const auto locked = guard();
  if (context_ != nullptr && process_ != ::getpid())
    return Status(Code::unsupported,
                  "this process was forked from one that had used UCC, and cannot use it; fork "
                  "before the first group of backend ucc, or start new programs");
  if (context_ == nullptr) {
    process_ = ::getpid();
    if (const UccStatus made = make_context(); made != kOk)
      return Status(Code::unsupported,
                    carried::failed(*this, "making a context", made).message() +
                        "; it needs UCC's components (Debian's are found with libucc-dev)");
    log(LogLevel::info, "backend ucc: " + version_);
  }
  return context_;
}

UccStatus UccLibrary::make_context() {
  UccLibConfig* config = nullptr;
  UccLib* lib = nullptr;
  UccLibParams lib_params{};
  lib_params.mask = kLibThreadMode;
  lib_params.thread_mode = kThreadMultiple;
  UccStatus status = functions_.lib_config_read(nullptr, nullptr, &config);
  if (status != kOk) return status;
  status = functions_.init_version(kApiMajor, kApiMinor, &lib_params, config, &lib);
  functions_.lib_config_release(config);
  if (status != kOk) return status;
  UccContextConfig* context_config = nullptr;
  const UccContextParams params{};
  status = functions_.context_config_read(lib, nullptr, &context_config);
  if (status != kOk) return status;
  status = functions_.context_create(lib, &params, context_config, &context_);
  functions_.context_config_release(context_config);
  return status;
}

/// A request that failed is not given back: other members may still write to its memory.
int UccLibrary::test(carried::CarriedRequest& request, bool& done, carried::CarriedArrival*) {
  done = !request.active;
  if (done) return kOk;
  const auto locked = guard();
  functions_.context_progress(context_);
  auto* const made = std::bit_cast<UccRequest*>(request.handle);
  if (made->status > kOk) return kOk;
  done = true;
  if (made->status < kOk) return made->status;
  request.active = false;
  return functions_.collective_finalize(made);
}

}  // namespace muster::ucc
