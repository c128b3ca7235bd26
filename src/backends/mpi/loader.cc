// SPDX-License-Identifier: BSD-3-Clause
#include "backends/mpi/loader.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <optional>
#include <vector>

#include "backends/carried/call.h"
#include "core/base/environment.h"
#include "core/base/log/log.h"
#include "core/base/process/fork_guard.h"
#include "core/security/own_files.h"

namespace muster::mpi {
namespace {

namespace fs = std::filesystem;

constexpr const char* kAbiLibrary = "libmpi_abi.so.1";
constexpr const char* kOpenMpi = "libmpi.so.40";
constexpr const char* kDebianMpich = "libmpich.so.12";
constexpr const char* kMpich = "libmpi.so.12";

/// A library of MPI, loaded with its symbols visible to the plugin and to its own components.
struct FoundLibrary {
  void* handle = nullptr;
  std::string path;
};

std::string path_of(void* handle, const std::string& asked) {
  const link_map* map = nullptr;
  if (::dlinfo(handle, RTLD_DI_LINKMAP, static_cast<void*>(&map)) != 0 || map->l_name[0] == '\0')
    return asked;
  return map->l_name;
}

std::optional<FoundLibrary> open(const std::string& name, int how) {
  void* const handle = ::dlopen(name.c_str(), RTLD_NOW | RTLD_GLOBAL | how);
  if (handle == nullptr) return {};
  return FoundLibrary{handle, path_of(handle, name)};
}

/// Folders of libraries of the launcher that started this process: an ancestor that is one.
std::vector<fs::path> launcher_folders() {
  constexpr int kMostAncestors = 6;  // limit: shells and wrappers between
  std::vector<fs::path> folders;
  std::string process = std::to_string(::getppid());
  for (int i = 0; i < kMostAncestors; ++i) {
    if (process == "0" || process == "1") break;
    std::error_code error;
    const fs::path program = fs::read_symlink("/proc/" + process + "/exe", error);
    const std::string name = program.filename().string();
    const auto begins = [&](const char* with) { return name.rfind(with, 0) == 0; };
    if (begins("hydra") || begins("mpi") || begins("ort") || begins("prte")) {
      folders.push_back(program.parent_path().parent_path() / "lib");
    }
    std::ifstream status("/proc/" + process + "/stat");
    std::string text;
    std::getline(status, text);
    const auto after_name = text.rfind(')');  // "pid (name) state parent"
    if (after_name == std::string::npos || after_name + 4 > text.size()) break;
    process = text.substr(after_name + 4, text.find(' ', after_name + 4) - after_name - 4);
  }
  return folders;
}

/// In the order in which they are tried.
std::vector<std::string> candidates() {
  std::vector<std::string> names;
  for (const fs::path& folder : launcher_folders()) {
    for (const char* name : {kAbiLibrary, kOpenMpi, kDebianMpich, kMpich}) {
      // An ancestor may be another user's.
      if (is_trusted_place((folder / name).string())) names.push_back((folder / name).string());
    }
  }
  const bool hydra = env_text("PMI_RANK").has_value();
  const bool open_mpi = env_text("OMPI_COMM_WORLD_RANK").has_value();
  if (open_mpi) names.emplace_back(kOpenMpi);
  if (hydra) {
    for (const char* name : {kDebianMpich, kMpich}) names.emplace_back(name);
  }
  for (const char* name : {kAbiLibrary, kOpenMpi, kDebianMpich, kMpich}) names.emplace_back(name);
  return names;
}

Result<FoundLibrary> find_library() {
  if (const auto given = env_text("MUSTER_MPI_LIBRARY")) {
    if (auto found = open(*given, 0)) return *found;
    return Status(Code::unsupported,
                  "the MPI library that MUSTER_MPI_LIBRARY names cannot be "
                  "loaded: " +
                      std::string(::dlerror()));
  }
  for (const char* name : {kAbiLibrary, kOpenMpi, kDebianMpich, kMpich})
    if (auto found = open(name, RTLD_NOLOAD)) return *found;
  for (const std::string& name : candidates())
    if (auto found = open(name, 0)) return *found;
  return Status(Code::unsupported,
                "no MPI library was found: " + std::string(kAbiLibrary) + ", " + kOpenMpi + ", " +
                    kDebianMpich + " and " + kMpich +
                    " cannot be loaded; install Open MPI or MPICH, or set MUSTER_MPI_LIBRARY to "
                    "the path of the library");
}

/// The plugin is named after the flavour of the library.
const char* flavour_of(const FoundLibrary& library) {
  if (::dlsym(library.handle, "ompi_mpi_comm_world") != nullptr) return "openmpi";
  const auto name = fs::path(library.path).filename().string();
  return name.find("mpi_abi") != std::string::npos ? "abi" : "mpich";
}

/// The folders of plugins, unless MUSTER_PLUGINS names one: beside this code's file and next to its
/// folder, both in a build folder and in an installation; and the folder of the installation.
std::vector<fs::path> plugin_folders() {
  std::vector<fs::path> folders;
  Dl_info here{};
  if (::dladdr(reinterpret_cast<const void*>(&load), &here) != 0 && here.dli_fname != nullptr) {
    std::error_code error;
    // For the program itself dladdr gives only the name by which it was called.
    fs::path file = fs::canonical(here.dli_fname, error);
    if (error || file.extension() != ".so") {
      const fs::path program = fs::read_symlink("/proc/self/exe", error);
      if (file.empty() || file.filename() == program.filename()) file = program;
    }
    const fs::path own = file.parent_path();
    for (const fs::path& folder : {own, own.parent_path(), own.parent_path().parent_path()}) {
      folders.push_back(folder / "lib/muster");
      folders.push_back(folder / "muster");
    }
    folders.push_back(own);
  }
  folders.emplace_back(MUSTER_PLUGIN_FOLDER);
  return folders;
}

template <class Function>
Function* symbol(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

Result<Library*> load_plugin(const FoundLibrary& library) {
  const std::string file = std::string("libmuster_mpi_") + flavour_of(library) + ".so";
  std::string trouble;
  std::vector<fs::path> paths;
  if (const auto given = env_text("MUSTER_PLUGINS")) paths.push_back(fs::path(*given) / file);
  for (const fs::path& folder : plugin_folders()) {
    if (is_trusted_place((folder / file).string())) paths.push_back(folder / file);
  }
  for (const fs::path& path : paths) {
    std::error_code error;
    if (!fs::exists(path, error)) continue;
    void* const plugin = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (plugin == nullptr) {
      trouble = ::dlerror();
      continue;
    }
    auto* const abi = symbol<unsigned()>(plugin, "muster_mpi_plugin_abi");
    auto* const make = symbol<Library*()>(plugin, "muster_mpi_library");
    if (abi != nullptr && make != nullptr && abi() == kPluginAbi) return make();
    trouble = path.string() + " belongs to another version of muster";
  }
  if (!trouble.empty())
    return Status(Code::unsupported, "the plugin for " + library.path +
                                         " cannot be used: " + trouble +
                                         "; use a newer MPI library, or build muster with its "
                                         "mpi.h");
  return Status(Code::unsupported,
                "this build of muster has no " + file + ", the plugin for " + library.path +
                    "; build muster where mpi.h of that MPI is installed, or use an MPI with the "
                    "MPI-5 ABI");
}

std::string& loaded_path() {
  static std::string path;
  return path;
}

std::atomic<bool> leaves_unfinalized{false};
Library* to_finalize = nullptr;
ProcessMark* initialized_in = nullptr;

/// Runs at exit. A forked child is no rank of MPI.
void finalize() {
  if (leaves_unfinalized.load() || initialized_in->forked() || to_finalize->is_finalized()) return;
  to_finalize->finalize();
}

Result<MpiWorld> initialize() {
  auto library = load();
  if (!library) return library.status();
  if ((*library)->is_finalized())
    return Status(Code::unsupported,
                  "the program has called MPI_Finalize; MPI cannot be initialised again");
  bool ours = false;
  ThreadLevel level = ThreadLevel::single;
  if (const int code = (*library)->initialize(ours, level); code != 0)
    return carried::failed(**library, "MPI_Init_thread", code);
  if (level < ThreadLevel::serialized)
    return Status(Code::unsupported,
                  "MPI was initialised below MPI_THREAD_SERIALIZED, so muster's threads may not "
                  "call it; initialise it by MPI_Init_thread with MPI_THREAD_MULTIPLE, or leave "
                  "that to init_process_group");
  if (ours) {
    to_finalize = *library;
    initialized_in = new ProcessMark;
    std::atexit(&finalize);
  }
  MpiWorld world{*library, 0, 1, 0};
  if (const int code = (*library)->world(world.rank, world.size, world.last_tag); code != 0)
    return carried::failed(**library, "MPI_Comm_rank", code);
  log(LogLevel::info, "backend mpi: " + (*library)->version() + " in " + library_path() +
                          ", rank " + std::to_string(world.rank) + " of " +
                          std::to_string(world.size) +
                          (level == ThreadLevel::multiple ? "" : ", one thread at a time"));
  return world;
}

}  // namespace

Result<Library*> load() {
  static const auto library = []() -> Result<Library*> {
    auto found = find_library();
    if (!found) return found.status();
    auto plugin = load_plugin(*found);
    if (plugin) loaded_path() = found->path;
    return plugin;
  }();
  return library;
}

const std::string& library_path() { return loaded_path(); }

Result<MpiWorld> start() {
  static const auto world = initialize();
  return world;
}

void leave_unfinalized() { leaves_unfinalized.store(true); }

}  // namespace muster::mpi
