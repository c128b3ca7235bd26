# SPDX-License-Identifier: BSD-3-Clause
"""The libraries that muster is linked with, and how. tools/third_party says what they are for."""

import dataclasses

COMPILED_IN = "headers, compiled in"
SHARED = "shared"
LOADED = "loaded at run time, if found"
TESTS = "tests only"


@dataclasses.dataclass(frozen=True)
class Library:
    name: str
    package: str  # of Debian, which tools/setup installs
    linked: str
    includes: str  # how its headers begin: `asio/`, `sodium.h`; empty: no file includes one
    cmake: str = ""  # what find_package() or pkg_check_modules() calls it
    licence: str = ""  # SPDX; empty: as the copyright file's machine-readable part says


LIBRARIES = (
    Library("Asio", "libasio-dev", COMPILED_IN, "asio/"),
    Library("cereal", "libcereal-dev", COMPILED_IN, "cereal/"),
    Library("CLI11", "libcli11-dev", COMPILED_IN, "CLI/", "CLI11"),
    Library("cpp-httplib", "libcpp-httplib-dev", SHARED, "httplib.h", "httplib"),
    Library("curl", "libcurl4-openssl-dev", SHARED, "curl/", "CURL"),
    Library("{fmt}", "libfmt-dev", SHARED, "fmt/", "fmt"),
    Library("GoogleTest", "libgtest-dev", TESTS, "gtest/", "GTest"),
    Library("hwloc", "libhwloc-dev", SHARED, "hwloc.h", "hwloc", "BSD-3-Clause"),
    Library("JSON for Modern C++", "nlohmann-json3-dev", COMPILED_IN, "nlohmann/"),
    Library("libsodium", "libsodium-dev", SHARED, "sodium.h", "libsodium"),
    Library("OpenSSL", "libssl-dev", SHARED, "openssl/", "OpenSSL"),
    Library("PMIx", "libpmix-dev", LOADED, "pmix.h", "pmix", "BSD-3-Clause-Open-MPI"),
    Library("prometheus-cpp", "prometheus-cpp-dev", SHARED, "prometheus/", "prometheus"),
    Library("spdlog", "libspdlog-dev", SHARED, "spdlog/", "spdlog"),
    Library("toml++", "libtomlplusplus-dev", COMPILED_IN, "toml++/"),
    Library("xxHash", "libxxhash-dev", COMPILED_IN, "xxhash.h"),
)

# The one library that muster is linked with, of the development packages that have several.
ONLY_LIBRARY = {"prometheus-cpp-dev": "libprometheus-cpp-core.so"}

# Not libraries with a row: the compiler's, the kernel's, libc's, Python's, torch's and its
# pybind11's, and the headers of an MPI that plugins are compiled from.
OTHER_HEADERS = (
    *("sys/", "netinet/", "net/", "linux/", "arpa/", "sanitizer/"),
    *("muster/", "torch/", "ATen/", "c10/", "pybind11/", "Python.h", "mpi.h"),
)
OTHER_PACKAGES = ("Threads", "PkgConfig", "Python", "Python3", "Libtorch", "muster")
