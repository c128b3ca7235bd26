// SPDX-License-Identifier: BSD-3-Clause
// Finding and loading NCCL: the stand-in, older versions of it, and the real library where torch's
// wheel brings it.
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <link.h>

#include <cstdlib>
#include <filesystem>
#include <memory>
#include <string>

#include "backends/nccl/communicator.h"
#include "backends/nccl/library.h"
#include "backends/nccl/transfers.h"
#include "nccl_ranks.h"
#include "testing/limits.h"
#include "testing/rank_processes.h"

namespace muster::testing {
namespace {

using nccl::NcclLibrary;

// spec: A6 a version of NCCL that lacks a function is refused by the function's name and its
// version
TEST(NcclLibrary, AVersionThatLacksAFunctionIsNamed) {
  const auto old = NcclLibrary::open(NCCL_STANDIN_2_13);
  ASSERT_FALSE(old.ok());
  EXPECT_EQ(old.status().code(), Code::unsupported);
  for (const char* part : {"NCCL 2.13.4", "libnccl_standin_2_13.so", "ncclCommInitRankConfig",
                           "came with NCCL 2.14", "MUSTER_NCCL_LIBRARY"})
    EXPECT_HAS(old.status().message(), part);
}

// spec: A6 what needs a missing function is refused, the rest works
TEST(NcclLibrary, AFunctionThatFewCallsNeedMayBeMissing) {
  use_standin();
  const auto library = NcclLibrary::open(NCCL_STANDIN_2_14);
  ASSERT_TRUE(library.ok()) << library.status().message();
  EXPECT_HAS((*library)->need("ncclRedOpCreatePreMulSum").message(),
             "NCCL 2.14.3 (" NCCL_STANDIN_2_14 ") has no function ncclRedOpCreatePreMulSum");
  EXPECT_HAS((*library)->need("ncclCommGrow").message(), "came with NCCL 2.29");
  EXPECT_TRUE((*library)->need("ncclAllReduce").ok());
  EXPECT_EQ((*library)->device(), deferred::kType);
}

// spec: A6 float8 is refused by name with a version of NCCL that does not reduce it
TEST(NcclLibrary, Float8NeedsAVersion) {
  use_standin();
  const auto why = [](const char* path) {
    return nccl::why_not_reduced(**NcclLibrary::open(path), collective::Reduce::sum,
                                 at::kFloat8_e4m3fn, 0);
  };
  EXPECT_HAS(why(NCCL_STANDIN_2_14),
             "NCCL reduces Float8_e4m3fn tensors from 2.24 on, and this is NCCL 2.14.3");
  EXPECT_EQ(why(NCCL_STANDIN), "");
}

// spec: A6 B13 options that a version of NCCL would ignore are refused by their names
TEST(NcclLibrary, OptionsThatAVersionLacksAreNamed) {
  use_standin();
  const auto library = NcclLibrary::open(NCCL_STANDIN_2_14);
  ASSERT_TRUE(library.ok()) << library.status().message();
  const auto refusal = [&](const ProcessGroupNCCL::NCCLConfig& config) {
    ProcessGroupNCCL::Options options;
    options.config = config;
    return text_of([&] { nccl::NcclSettings(**library, &options); });
  };
  EXPECT_HAS(refusal({.max_ctas = 8}),
             "config.max_ctas came with NCCL 2.17, and this is NCCL 2.14");
  EXPECT_HAS(refusal({.split_share = 1}), "config.split_share came with NCCL 2.18");
  EXPECT_HAS(refusal({.comm_name = "x"}), "config.comm_name came with NCCL 2.27");
  EXPECT_EQ(refusal({.blocking = 0}), "");
}

// spec: A6 growing a communicator with a version of NCCL that cannot is refused by the functions'
// names and the version that has them
TEST(NcclLibrary, AVersionThatCannotGrowIsNamed) {
  use_standin();
  const auto library = NcclLibrary::open(NCCL_STANDIN_2_14);
  ASSERT_TRUE(library.ok()) << library.status().message();
  const auto settings = std::make_shared<nccl::NcclSettings>(**library, nullptr);
  nccl::NcclCommunicator parent(*library, device_of(0), settings),
      grown(*library, device_of(0), settings);
  parent.open({nccl::NcclCommunicator::unique_id(**library)}, 1, 0, [] {});
  const auto id = message_of<DistBackendError>([&] { parent.growth_id(); });
  const auto member = message_of<DistBackendError>([&] { grown.begin_growth(parent, 2, nullptr); });
  const auto joins = message_of<DistBackendError>([&] { grown.begin_joining({}, 2, 1); });
  EXPECT_HAS(id, "NCCL 2.14.3");
  EXPECT_HAS(id, "ncclCommGetUniqueId, which came with NCCL 2.29");
  EXPECT_HAS(member, "ncclCommGrow, which came with NCCL 2.29");
  EXPECT_HAS(joins, "MUSTER_NCCL_LIBRARY");
}

TEST(NcclLibrary, WrongFilesAreNamed) {
  EXPECT_HAS(NcclLibrary::open("/no/such/libnccl.so").status().message(), "/no/such/libnccl.so");
  EXPECT_HAS(NcclLibrary::open("libm.so.6").status().message(), "is not NCCL");
}

/// The wheel's library; empty without one.
std::string wheel() {
  link_map* map = nullptr;
  void* const c10 = ::dlopen("libc10.so", RTLD_NOW | RTLD_NOLOAD);
  if (c10 == nullptr || ::dlinfo(c10, RTLD_DI_LINKMAP, &map) != 0) return {};
  const auto path =
      std::filesystem::canonical(map->l_name).parent_path().parent_path().parent_path() /
      "nvidia/nccl/lib/libnccl.so.2";
  return std::filesystem::exists(path) ? path.string() : std::string();
}

/// `body` in a process of its own, which loads NCCL anew.
std::string in_a_process(const std::function<std::string()>& body) {
  RankProcesses process(1, [&](int) { return body(); });
  return process.join(muster::testing::kMustHappen).front().report;
}

// spec: A3 the real library is found beside torch and works as far as it does without a GPU; A9
// is_nccl_available
TEST(NcclLibrary, TheWheelsLibraryIsFound) {
  if (wheel().empty()) GTEST_SKIP() << "no NCCL beside torch";
  const auto said = in_a_process([] {
    ::unsetenv("MUSTER_NCCL_LIBRARY");
    if (!is_nccl_available()) return NcclLibrary::of_process().status().message();
    const auto& library = **NcclLibrary::of_process();
    const auto id = nccl::NcclCommunicator::unique_id(library);
    return library.path() + (id.bytes[0] != 0 || id.bytes[8] != 0 ? " " : " empty id ") +
           library.version() + " " + library.error_text(1) + " " +
           c10::DeviceTypeName(library.device(), true);
  });
  EXPECT_HAS(said, wheel());
  EXPECT_HAS(said, "unhandled cuda error");
  EXPECT_HAS(said, " cuda");
}

// spec: A6 without a GPU, a communicator of the real library is refused with NCCL's own words
TEST(NcclLibrary, TheRealLibrarySaysWhyItCannot) {
  if (wheel().empty()) GTEST_SKIP() << "no NCCL beside torch";
  if (c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA)) GTEST_SKIP() << "there is CUDA";
  const auto said = in_a_process([] {
    deferred::install();
    const auto library = NcclLibrary::open(wheel());
    if (!library.ok()) return library.status().message();
    return message_of<DistBackendError>([&] {
      nccl::NcclCommunicator communicator(*library, device_of(0),
                                          std::make_shared<nccl::NcclSettings>(**library, nullptr));
      communicator.open({nccl::NcclCommunicator::unique_id(**library)}, 1, 0, [] {});
    });
  });
  for (const char* part : {"ncclCommInitRankConfig", "unhandled cuda error", "NCCL_DEBUG=INFO"})
    EXPECT_HAS(said, part);
}

// Never two copies of NCCL in a process.
TEST(NcclLibrary, AnotherCopyThanTheOneLoadedIsRefused) {
  if (wheel().empty()) GTEST_SKIP() << "no NCCL beside torch";
  const auto said = in_a_process([] {
    if (::dlopen(wheel().c_str(), RTLD_NOW) == nullptr) return std::string(::dlerror());
    ::setenv("MUSTER_NCCL_LIBRARY", "/opt/other/libnccl.so.2", 1);
    return NcclLibrary::of_process().status().message();
  });
  EXPECT_HAS(said, "MUSTER_NCCL_LIBRARY is /opt/other/libnccl.so.2");
  EXPECT_HAS(said, wheel());
}

// spec: A7 no backend given: native for CPU tensors and nccl for CUDA tensors where they can be,
// else native stages them; A1 get_backend says so
TEST(NcclLibrary, TheStandardConfigurationGoesByWhatIsThere) {
  const auto both = BackendConfig::standard(true, true);
  EXPECT_EQ(both.text(), "cpu:native,cuda:nccl");
  EXPECT_EQ(both.for_device(at::kCUDA), Backend::NCCL);
  EXPECT_EQ(both.for_device(at::kCPU), Backend::NATIVE);
  const auto staged = BackendConfig::standard(true, false);
  EXPECT_EQ(staged.text(), "cpu:native");
  EXPECT_EQ(staged.for_device(at::kCUDA), Backend::NATIVE);
  EXPECT_FALSE(BackendConfig::standard(false, true).for_device(at::kCUDA));
}

}  // namespace
}  // namespace muster::testing
