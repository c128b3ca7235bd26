# SPDX-License-Identifier: BSD-3-Clause
# cmake -DTREE=<source tree> -DFILE=<file> -P write_commit.cmake: writes a C++ file with the commit
# that is checked out, with "-dirty" after it if files that git knows are changed, or with "" if the
# tree is no checkout of git. A file that has these lines is left as it is.
set(commit "")
if(EXISTS "${TREE}/.git")
  execute_process(COMMAND git -C "${TREE}" describe --always --dirty --abbrev=12 --exclude=*
    OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
file(CONFIGURE OUTPUT "${FILE}" CONTENT "#include \"faces/cli/version.h\"\n
namespace muster::cli {
std::string commit() { return \"${commit}\"; }
}  // namespace muster::cli\n" @ONLY)
