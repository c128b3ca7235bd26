#include "core/collective/region/call_wait.h"

#include "core/collective/region/call_failure.h"

namespace muster::collective::region {

bool CallWait::is_behind(int member) const {
  if (member == segment_.rank()) return false;
  switch (target_.what) {
    case WaitTarget::nothing: return false;
    case WaitTarget::room: return lines_.lacks_room_from(member);
    case WaitTarget::lines: return !segment_.has_begun(member);
    case WaitTarget::counter:
      return !shm::reached(segment_.counter(member, target_.counter), target_.until);
  }
  return false;
}

std::vector<int> CallWait::awaited() const {
  std::vector<int> late;    // have not begun this call
  std::vector<int> waited;  // are behind what this task needs
  for (int member = 0; member < segment_.size(); ++member) {
    if ((target_.only >= 0 && target_.only != member) || !is_behind(member)) continue;
    waited.push_back(job_rank(channel_, member));
    if (!segment_.has_begun(member)) late.push_back(waited.back());
  }
  return late.empty() ? waited : late;
}

}  // namespace muster::collective::region
