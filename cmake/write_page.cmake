# SPDX-License-Identifier: BSD-3-Clause
# cmake -DPAGE=<page.html> -DFILE=<file> -P write_page.cmake: writes a C++ file with a function that
# returns the page.
file(READ "${PAGE}" page)
if(page MATCHES "\\)page\"")
  message(FATAL_ERROR "${PAGE} has the end of the literal that it is put into")
endif()
file(WRITE "${FILE}" "#include \"faces/cli/dash/dash_page.h\"\n
namespace muster::cli {
std::string dash_page() { return R\"page(${page})page\"; }
}  // namespace muster::cli\n")
