// SPDX-License-Identifier: BSD-3-Clause
#include "faces/cli/testing/launched.h"
#include "testing/limits.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <sstream>

namespace muster::cli::testing {
namespace {

constexpr auto kPatience = muster::testing::kMustHappen;

int milliseconds_until(std::chrono::steady_clock::time_point deadline) {
  const auto left =
      std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now())
          .count();
  return static_cast<int>(std::max<decltype(left)>(left, 0));
}

void read_into(Descriptor& end, std::string& text) {
  char buffer[65536];
  const ssize_t got = ::read(end.get(), buffer, sizeof buffer);
  if (got > 0) text.append(buffer, static_cast<std::size_t>(got));
  if (got == 0) end.reset();
}

}  // namespace

Launched::Launched(const std::vector<std::string>& arguments, const Variables& variables,
                   const std::function<void()>& before)
    : deadline_(std::chrono::steady_clock::now() + kPatience) {
  std::vector<std::string> words = {MUSTER_COMMAND};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<std::string> environment = {std::string("PATH=") + ::getenv("PATH")};
  for (const char* kept : {"ASAN_OPTIONS", "TSAN_OPTIONS", "UBSAN_OPTIONS", "LSAN_OPTIONS"}) {
    if (const char* value = ::getenv(kept)) environment.push_back(std::string(kept) + "=" + value);
  }
  for (const auto& [name, value] : variables) environment.push_back(name + "=" + value);
  std::vector<char*> argv, envp;
  for (std::string& word : words) argv.push_back(word.data());
  for (std::string& entry : environment) envp.push_back(entry.data());
  argv.push_back(nullptr);
  envp.push_back(nullptr);
  int out[2], err[2];
  if (::pipe2(out, O_CLOEXEC) != 0 || ::pipe2(err, O_CLOEXEC) != 0) ::abort();
  out_.reset(out[0]);
  err_.reset(err[0]);
  pid_ = ::fork();
  if (pid_ == 0) {
    ::dup2(out[1], 1);
    ::dup2(err[1], 2);
    if (before) before();
    ::execve(argv[0], argv.data(), envp.data());
    ::_exit(127);
  }
  ::close(out[1]);
  ::close(err[1]);
}

Launched::~Launched() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Launched::signal(int number) { ::kill(pid_, number); }

bool Launched::read_more() {
  pollfd ends[2] = {{out_.get(), POLLIN, 0}, {err_.get(), POLLIN, 0}};
  const int ready = ::poll(ends, 2, milliseconds_until(deadline_));
  if (ready < 0) return errno == EINTR;
  if (ready == 0) return false;
  if (ends[0].revents != 0) read_into(out_, out_text_);
  if (ends[1].revents != 0) read_into(err_, err_text_);
  return true;
}

bool Launched::wait_until(const std::string& stream, const std::string& text, int times) {
  while (count_of(stream, text) < times) {
    if ((!out_ && !err_) || !read_more()) {
      ADD_FAILURE() << "never saw \"" << text << "\"; output so far:\n"
                    << out_text_ << "\nerror so far:\n"
                    << err_text_;
      return false;
    }
  }
  return true;
}

bool Launched::wait_for_output(const std::string& text, int times) {
  return wait_until(out_text_, text, times);
}
bool Launched::wait_for_error(const std::string& text) { return wait_until(err_text_, text, 1); }

Outcome Launched::finish() {
  while (out_ || err_) {
    if (read_more()) continue;
    ADD_FAILURE() << "the command did not end; output so far:\n"
                  << out_text_ << "\nerror so far:\n"
                  << err_text_;
    ::kill(pid_, SIGKILL);
    break;
  }
  int state = 0;
  ::waitpid(pid_, &state, 0);
  pid_ = -1;
  return {WIFSIGNALED(state) ? 128 + WTERMSIG(state) : WEXITSTATUS(state), out_text_, err_text_};
}

std::function<void()> localhost_of_both_families(const std::string& hosts_file) {
  std::ofstream(hosts_file) << "::1 localhost\n127.0.0.1 localhost\n"
                            << std::ifstream("/etc/hosts").rdbuf();
  return [hosts_file] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
        ::mount(hosts_file.c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0)
      ::_exit(127);
  };
}

Fifo::Fifo() {
  if (::mkfifo(path_.c_str(), 0600) != 0) ::abort();
}

bool Fifo::open() {
  end_.reset(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
  return static_cast<bool>(end_);
}

bool Fifo::wait_for_end() {
  const auto deadline = std::chrono::steady_clock::now() + kPatience;
  for (;;) {
    pollfd end{end_.get(), POLLIN, 0};
    const int ready = ::poll(&end, 1, milliseconds_until(deadline));
    if (ready == 0) return false;
    char buffer[4096];
    if (ready > 0 && ::read(end_.get(), buffer, sizeof buffer) == 0) return true;
  }
}

std::vector<std::string> sorted_lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  std::sort(lines.begin(), lines.end());
  return lines;
}

int count_of(const std::string& text, const std::string& what) {
  int count = 0;
  for (std::size_t at = text.find(what); at != std::string::npos;
       at = text.find(what, at + what.size()))
    ++count;
  return count;
}

std::string contents(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace muster::cli::testing
