// SPDX-License-Identifier: BSD-3-Clause
/// For tests of `muster run --hosts`: a script in place of ssh, which starts the node on this
/// machine, in an environment as empty as sshd's.
#pragma once

#include <sys/stat.h>

#include <fstream>
#include <string>

#include "testing/scratch_folder.h"

namespace muster::cli::testing {

class SshStandin {
 public:
  /// The script fails as ssh does if nothing listens there for the machine called `refused`.
  /// `deaf` says so, ignores every signal and starts nothing. On others the node is the process
  /// that the script becomes, or, with `apart`, a child that outlives it.
  explicit SshStandin(bool apart = false) {
    std::ofstream(command()) << "#!/bin/bash\n"
                             << "printf '%s\\n' \"$*\" >> " << words_file() << "\n"
                             << R"(while [[ $1 == -* ]]; do
  if [[ $1 == -o ]]; then shift 2; else shift; fi
done
host=$1
shift
case $host in
  refused) echo "ssh: connect to host refused port 22: Connection refused" >&2; exit 255 ;;
  deaf)
    trap '' HUP INT TERM
    echo "deaf and here" >&2
    while read -r line; do :; done
    exec sleep infinity ;;
esac
start=(env -i PATH="$PATH" HOST="$host")
for name in ASAN_OPTIONS TSAN_OPTIONS UBSAN_OPTIONS LSAN_OPTIONS; do
  [[ -z ${!name} ]] || start+=("$name=${!name}")
done
)"
                             << "echo $$ >> " << folder_.file("pid-of-") + "$host\n"
                             << (apart
                                     ? "exec 3<&0\n\"${start[@]}\" sh -c \"$*\" <&3 3<&- &\nwait\n"
                                     : "exec \"${start[@]}\" sh -c \"$*\"\n");
    ::chmod(command().c_str(), 0700);
  }
  std::string command() const { return folder_.file("ssh"); }
  /// A line for each call: the words that it got.
  std::string words_file() const { return folder_.file("words"); }
  /// Has the number of the script's process for a machine.
  std::string pid_file(const std::string& host) const { return folder_.file("pid-of-" + host); }
  const std::string& folder() const { return folder_.path(); }

 private:
  const muster::testing::ScratchFolder folder_;
};

}  // namespace muster::cli::testing
