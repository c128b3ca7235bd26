// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/doctor/findings.h"

#include <algorithm>
#include <cstdio>
#include <iostream>

#include "faces/cli/json_line.h"
#include "faces/cli/printable.h"

namespace muster::cli {

void Findings::add(const std::string& what, const std::string& text, bool good) {
  if (!good && std::find(troubles_.begin(), troubles_.end(), what) == troubles_.end())
    troubles_.push_back(what);
  lines_.push_back({{"what", what}, {"text", text}, {"good", good}});
  if (!as_json_)
    std::printf("%-18s %s%s\n", what.c_str(), printable_line(text).c_str(),
                good ? "" : "   <-- look here");
}

int Findings::conclude() const {
  if (as_json_) {
    nlohmann::json told = attached_;
    told["ready"] = troubles_.empty();
    told["in_the_way"] = troubles_;
    told["findings"] = lines_;
    std::cout << json_line(told);
    return troubles_.empty() ? 0 : 1;
  }
  std::string names;
  for (const std::string& each : troubles_) names += (names.empty() ? "" : ", ") + each;
  std::printf("%-18s %s\n", "verdict",
              troubles_.empty() ? "ready: nothing here is in the way of a job"
                                : ("not ready; look at: " + names).c_str());
  return troubles_.empty() ? 0 : 1;
}

}  // namespace muster::cli
