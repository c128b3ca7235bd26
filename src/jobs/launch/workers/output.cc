#include "jobs/launch/workers/output.h"

#include <sys/stat.h>

#include <algorithm>

namespace muster::launch {

void LinePrefixer::emit(std::string_view line, std::string& out) {
  out.append(prefix_);
  out.append(pending_);
  out.append(line);
  pending_.clear();
}

std::string expand_names(const std::string& text, const std::map<std::string, std::string>& names) {
  std::string result;
  std::size_t from = 0;
  for (std::size_t at = text.find("${"); at != std::string::npos; at = text.find("${", from)) {
    const std::size_t close = text.find('}', at);
    if (close == std::string::npos) break;
    result += text.substr(from, at - from);
    const auto name = names.find(text.substr(at + 2, close - at - 2));
    result += name != names.end() ? name->second : text.substr(at, close + 1 - at);
    from = close + 1;
  }
  return result + text.substr(from);
}

void LinePrefixer::feed(std::string_view bytes, std::string& out) {
  while (!bytes.empty()) {
    // The previous piece ended with a carriage return. Only now is it known whether a newline
    // follows.
    if (!pending_.empty() && pending_.back() == '\r' && bytes.front() != '\n') emit({}, out);
    std::size_t end = bytes.find_first_of("\r\n");
    if (end != std::string_view::npos && bytes[end] == '\r') {
      if (end + 1 == bytes.size()) {
        end = std::string_view::npos;
      } else if (bytes[end + 1] == '\n') {
        ++end;
      }
    }
    const std::size_t room = kMaxLineBytes - std::min(kMaxLineBytes, pending_.size());
    const std::size_t length = end == std::string_view::npos ? bytes.size() : end + 1;
    if (length > room) {
      emit(bytes.substr(0, room), out);
      out.push_back('\n');
      bytes.remove_prefix(room);
    } else if (end == std::string_view::npos) {
      pending_.append(bytes);
      return;
    } else {
      emit(bytes.substr(0, length), out);
      bytes.remove_prefix(length);
    }
  }
}

void LinePrefixer::finish(std::string& out) {
  if (pending_.empty()) return;
  emit("\n", out);
}

void Tail::feed(std::string_view bytes) {
  if (bytes.size() >= kBytes) {
    bytes_ = bytes.substr(bytes.size() - kBytes);
    return;
  }
  bytes_.append(bytes);
  if (bytes_.size() > 4 * kBytes) bytes_.erase(0, bytes_.size() - kBytes);
}

std::string Tail::text() const {
  std::string_view text = bytes_;
  if (text.size() > kBytes) text.remove_prefix(text.size() - kBytes);
  while (!text.empty() && (text.back() == '\n' || text.back() == '\r')) text.remove_suffix(1);
  std::size_t from = text.size();
  for (int lines = 0; lines < kLines && from != std::string_view::npos && from > 0; ++lines)
    from = text.rfind('\n', from - 1);
  if (from != std::string_view::npos && from < text.size() && text[from] == '\n')
    text.remove_prefix(from + 1);
  return std::string(text);
}

bool same_file(int one, int other) {
  struct stat a {
  }, b{};
  return ::fstat(one, &a) == 0 && ::fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
         a.st_ino == b.st_ino;
}

}  // namespace muster::launch
