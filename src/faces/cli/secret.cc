// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/commands.h"

#include <unistd.h>

#include <cerrno>
#include <iostream>
#include <utility>

#include "core/base/descriptor.h"
#include "core/base/process/limits.h"
#include "core/security/own_files.h"
#include "core/security/secret.h"
#include "faces/cli/metrics/metrics.h"
#include "faces/cli/parse.h"
#include "faces/cli/printable.h"

namespace muster::cli {
namespace {

struct SecretOptions {
  std::string path;
  bool observer = false, metrics = false;
};

int make_secret(const SecretOptions& options) {
  const std::string& path = options.path;
  std::string text = Secret::random_text();
  if (options.metrics) {
    auto token = metrics_token();
    if (!token) return complain("secret", token.status().message());
    text = std::move(*token);
  } else if (options.observer) {
    const auto secret = Secret::from_environment(Secret::Use::observe);
    if (!secret) return complain("secret", secret.status().message());
    if (secret->kind() != Secret::Kind::given)
      return complain("secret",
                      "there is no secret in the environment to make an observers' key of; set "
                      "MUSTER_SECRET or MUSTER_SECRET_FILE to the job's");
    text = secret->observer_text();
  }
  text += "\n";
  if (path.empty()) {
    std::cout << text << std::flush;
    return std::cout.good() ? 0 : 1;
  }
  const FileSizeSignalBlock block;
  const auto file = open_own_file(path, O_WRONLY | O_CREAT | O_EXCL,
                                  {.name = "the secret's file", .closed = 077});
  Status written = file.status();
  if (written &&
      ::write(file->get(), text.data(), text.size()) != static_cast<ssize_t>(text.size()))
    written = Status(Code::exhausted, "cannot write " + path + ": " + errno_text(errno));
  return written ? 0 : complain("secret", written.message());
}

}  // namespace

Command secret_command() {
  auto app = make_app(
      "muster secret",
      "Makes a secret for a job: 256 random bits and check digits, as text. Give the same one to "
      "every node, in a file that MUSTER_SECRET_FILE names.");
  auto options = std::make_shared<SecretOptions>();
  auto* observer = app->add_flag(
      "--observer", options->observer,
      "instead, the observers' key of the secret in the environment: who has it can look "
      "at the job (`muster trace`, `top`, `doctor --job`) and do nothing else");
  app->add_flag("--metrics", options->metrics,
                "instead, the token with which Prometheus fetches the numbers of this secret's "
                "jobs (`muster run --metrics`), and nothing else; made of the secret or observers' "
                "key in the environment")
      ->excludes(observer);
  app->add_option("-o,--output", options->path,
                  "a new file to write it to, which nobody else can read (mode 0600), instead of "
                  "the console")
      ->option_text("FILE");
  return make_command(app, [options] { return make_secret(*options); });
}

}  // namespace muster::cli
