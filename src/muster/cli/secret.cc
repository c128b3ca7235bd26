#include "muster/cli/secret.h"

#include <unistd.h>

#include <cerrno>
#include <iostream>

#include "muster/base/own_files.h"
#include "muster/base/secret.h"
#include "muster/base/socket_address.h"
#include "muster/cli/parse.h"

namespace muster::cli {

int run_secret(const std::vector<std::string>& arguments) {
  CLI::App app(
      "Makes a secret for a job: 256 random bits, as 64 hexadecimal digits. Give the same one to "
      "every node, in a file that MUSTER_SECRET_FILE names.",
      "muster secret");
  std::string path;
  app.add_option("-o,--output", path,
                 "a new file to write it to, which nobody else can read (mode 0600), instead of "
                 "the console")
      ->option_text("FILE");
  if (const auto stop = parse(app, arguments)) return *stop;
  const std::string text = Secret::random_text() + "\n";
  if (path.empty()) {
    std::cout << text << std::flush;
    return std::cout.good() ? 0 : 1;
  }
  const auto file = open_own_file(path, O_WRONLY | O_CREAT | O_EXCL,
                                  {.name = "the secret's file", .closed = 077});
  Status written = file.status();
  if (written &&
      ::write(file->get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    written = Status(Code::exhausted, "cannot write " + path + ": " + errno_text(errno));
  if (written) return 0;
  std::cerr << "muster secret: " << written.message() << "\n";
  return 1;
}

}  // namespace muster::cli
