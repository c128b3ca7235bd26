# SPDX-License-Identifier: BSD-3-Clause
# cmake -DTREE=<source tree> -DFILE=<file> -P write_commit.cmake: writes a C++ file with the commit
# that is checked out, or with "" if the tree is no checkout of git.
set(commit "")
if(EXISTS "${TREE}/.git")
  execute_process(COMMAND git -C "${TREE}" rev-parse --short=12 HEAD
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
file(WRITE "${FILE}" "#include \"faces/cli/version.h\"\n
namespace muster::cli {
std::string commit() { return \"${commit}\"; }
}  // namespace muster::cli\n")
