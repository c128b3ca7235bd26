#include "checkpoint/format/files/local_path.h"

#include <algorithm>
#include <cctype>

#include "checkpoint/format/files/disk.h"
#include "core/base/environment.h"

namespace muster::shards {
namespace {

constexpr std::string_view kSchemeEnds = "://", kFileScheme = "file", kThisHost = "localhost/";
constexpr std::string_view kFilePath = "file:/";  // the same without a host

/// "s3" of "s3://bucket"; empty for a path.
std::string scheme_of(const std::string& name) {
  const std::size_t end = name.find(kSchemeEnds);
  if (end == std::string::npos || end == 0) return {};
  std::string scheme = name.substr(0, end);
  const bool good = std::all_of(scheme.begin(), scheme.end(), [](unsigned char each) {
    return std::isalnum(each) != 0 || each == '+' || each == '-' || each == '.';
  });
  if (!good || std::isalpha(static_cast<unsigned char>(scheme.front())) == 0) return {};
  std::transform(scheme.begin(), scheme.end(), scheme.begin(),
                 [](unsigned char each) { return static_cast<char>(std::tolower(each)); });
  return scheme;
}

}  // namespace

Result<std::string> local_path(const std::string& name) {
  std::string path = name;
  const std::string scheme = scheme_of(name);
  if (!scheme.empty() && scheme != kFileScheme)
    return Status(Code::unsupported,
                  "checkpoint: '" + name + "' is a name of " + scheme +
                      ", and checkpoints are folders of a mounted file system: save to such a "
                      "folder and copy it, or mount the store");
  if (!scheme.empty()) {
    path.erase(0, kFileScheme.size() + kSchemeEnds.size());
    if (path.starts_with(kThisHost)) path.erase(0, kThisHost.size() - 1);
    if (!path.starts_with('/') && !path.starts_with('~'))
      return Status(Code::invalid_argument,
                    "checkpoint: '" + name + "' names the host '" + path.substr(0, path.find('/')) +
                        "': file:///folder, with three slashes, is a folder of this machine");
  } else if (path.starts_with(kFilePath)) {
    path.erase(0, kFilePath.size() - 1);
  }
  if (path == "~" || path.starts_with("~/")) {
    const auto home = env_text("HOME");
    if (!home || home->empty())
      return Status(Code::invalid_argument,
                    "checkpoint: '" + name + "' begins in the home folder, and HOME is not set");
    path.replace(0, 1, without_slash(*home));
  }
  if (path.empty())
    return Status(Code::invalid_argument, "checkpoint: the name of a folder is needed");
  return without_slash(path);
}

}  // namespace muster::shards
