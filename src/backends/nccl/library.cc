// SPDX-License-Identifier: BSD-3-Clause
#include "backends/nccl/library.h"

#include <c10/core/Device.h>
#include <dlfcn.h>
#include <link.h>

#include <cstring>
#include <filesystem>
#include <system_error>

#include "core/base/environment.h"

namespace muster::nccl {
namespace {

constexpr const char* kSoname = "libnccl.so.2";

/// A library of tests exports these: the name of the device type that its buffers are on, and the
/// UUIDs and capabilities of such devices.
constexpr const char *kDeviceName = "musterStandinDevice", *kDeviceUuid = "musterStandinUuid",
                     *kDeviceCapability = "musterStandinCapability";

std::string version_text(int code) {
  const bool is_old = code < 10000;  // limit: 2.8.4 is 2804 and 2.9.6 is 20906
  const int major = is_old ? code / 1000 : code / 10000;
  const int minor = is_old ? code / 100 % 10 : code / 100 % 100;
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(code % 100);
}

/// The path of a library that this process has loaded already; empty if it has not.
std::string loaded(const char* soname) {
  void* const handle = ::dlopen(soname, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) return {};
  link_map* map = nullptr;
  const bool known = ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr;
  const std::string path = known ? map->l_name : "";
  ::dlclose(handle);
  return path;
}

/// The wheel's library beside torch's folder; empty if there is none.
std::string wheel_beside_torch() {
  std::error_code ignored;
  const auto torch = std::filesystem::canonical(loaded("libc10.so"), ignored).parent_path();
  const auto path = torch.parent_path().parent_path() / "nvidia" / "nccl" / "lib" / kSoname;
  return std::filesystem::exists(path, ignored) ? path.string() : std::string();
}

/// The driver's handle of a device. Empty: it does not tell.
std::optional<int> cuda_device(int index) {
  using GetDevice = int(int* device, int index);
  static auto* const get_device = reinterpret_cast<GetDevice*>(cuda_driver_function("cuDeviceGet"));
  int device = 0;
  if (get_device == nullptr || get_device(&device, index) != 0) return {};
  return device;
}

/// Returns 0 if it has written the UUID.
int cuda_uuid(int index, std::uint8_t* uuid) {
  using GetUuid = int(std::uint8_t * uuid, int device);
  static auto* const get_uuid = [] {
    // The newer one names the part of a divided GPU (MIG); CUDA 11.4 brought it.
    void* const newer = cuda_driver_function("cuDeviceGetUuid_v2");
    return reinterpret_cast<GetUuid*>(newer != nullptr ? newer
                                                       : cuda_driver_function("cuDeviceGetUuid"));
  }();
  const auto device = cuda_device(index);
  return device && get_uuid != nullptr ? get_uuid(uuid, *device) : -1;
}

/// 90 of sm90; 0: it is not known.
int cuda_capability(int index) {
  using GetAttribute = int(int* value, int attribute, int device);
  constexpr int kMajor = 75, kMinor = 76;  // CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_*
  static auto* const get =
      reinterpret_cast<GetAttribute*>(cuda_driver_function("cuDeviceGetAttribute"));
  const auto device = cuda_device(index);
  int major = 0, minor = 0;
  if (!device || get == nullptr || get(&major, kMajor, *device) != 0 ||
      get(&minor, kMinor, *device) != 0)
    return 0;
  return 10 * major + minor;
}

bool is_same_file(const std::string& a, const std::string& b) {
  std::error_code ignored;
  return std::filesystem::equivalent(a, b, ignored);
}

Result<std::shared_ptr<const NcclLibrary>> find() {
  const auto present = loaded(kSoname);
  if (const auto wanted = env_text("MUSTER_NCCL_LIBRARY")) {
    const auto name = std::filesystem::path(*wanted).filename().string();
    if (!present.empty() && name.starts_with("libnccl.so") && !is_same_file(present, *wanted))
      return Status(Code::unsupported, "MUSTER_NCCL_LIBRARY is " + *wanted +
                                           ", and this process has loaded " + present +
                                           " already; unset it, or preload that library");
    return NcclLibrary::open(*wanted);
  }
  if (!present.empty()) return NcclLibrary::open(present);
  if (const auto wheel = wheel_beside_torch(); !wheel.empty()) return NcclLibrary::open(wheel);
  return NcclLibrary::open(kSoname);
}

}  // namespace

void* cuda_driver_function(const char* name) {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  return driver == nullptr ? nullptr : ::dlsym(driver, name);
}

const Result<std::shared_ptr<const NcclLibrary>>& NcclLibrary::of_process() {
  static const auto* const found = new Result<std::shared_ptr<const NcclLibrary>>(find());
  return *found;
}

Result<std::shared_ptr<const NcclLibrary>> NcclLibrary::open(const std::string& path) {
  void* const handle = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return Status(Code::unsupported,
                  "NCCL's library cannot be loaded: " + std::string(::dlerror()) +
                      "; install the wheel nvidia-nccl beside torch, or name the file in "
                      "MUSTER_NCCL_LIBRARY");
  const auto library = std::make_shared<NcclLibrary>();
  for (const auto& row : kFunctions) {
    void* const function = ::dlsym(handle, row.name);
    std::memcpy(reinterpret_cast<char*>(&library->functions_) + row.offset, &function,
                sizeof function);
  }
  const auto& functions = library->functions_;
  library->path_ = path;
  if (functions.get_version == nullptr)
    return Status(Code::unsupported, path + " is not NCCL: it has no function ncclGetVersion");
  if (const auto file = loaded(path.c_str()); !file.empty()) library->path_ = file;
  int version = 0;
  functions.get_version(&version);
  library->version_ = version_text(version);
  library->version_code_ = version;
  for (const auto& row : kFunctions)
    if (row.needed)
      if (auto status = library->need(row.name); !status.ok()) return status;
  using DeviceName = const char*();
  if (const auto device = reinterpret_cast<DeviceName*>(::dlsym(handle, kDeviceName)))
    library->device_ = c10::Device(device()).type();
  library->standin_uuid_ =
      reinterpret_cast<decltype(library->standin_uuid_)>(::dlsym(handle, kDeviceUuid));
  library->standin_capability_ =
      reinterpret_cast<decltype(library->standin_capability_)>(::dlsym(handle, kDeviceCapability));
  return std::shared_ptr<const NcclLibrary>(library);
}

std::optional<DeviceUuid> NcclLibrary::device_uuid(c10::DeviceIndex index) const {
  DeviceUuid uuid{};
  const auto ask = standin_uuid_ != nullptr ? standin_uuid_ : &cuda_uuid;
  return ask(index, uuid.data()) == 0 ? std::optional(uuid) : std::nullopt;
}

int NcclLibrary::compute_capability(c10::DeviceIndex index) const {
  return standin_capability_ != nullptr ? standin_capability_(index) : cuda_capability(index);
}

Status NcclLibrary::need(const char* function) const {
  for (const auto& row : kFunctions) {
    if (std::strcmp(row.name, function) != 0) continue;
    const void* found = nullptr;
    std::memcpy(&found, reinterpret_cast<const char*>(&functions_) + row.offset, sizeof found);
    if (found != nullptr) return {};
    return Status(Code::unsupported, text() + " has no function " + row.name +
                                         ", which came with NCCL " + row.since +
                                         "; name a newer one in MUSTER_NCCL_LIBRARY");
  }
  return Status(Code::internal, std::string(function) + " is not in the table");
}

std::string NcclLibrary::error_text(ErrorCode code) const {
  const char* const text = functions_.get_error_string(code);
  return text != nullptr ? text : "error " + std::to_string(code);
}

}  // namespace muster::nccl
