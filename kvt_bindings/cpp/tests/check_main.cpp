#include <atomic>
#include <cstring>
#include <exception>
#include <vector>

#include "check.h"

namespace check {
namespace {

struct Case {
  const char* name;
  Body body;
};

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

std::atomic<int> failures{0};

}  // namespace

bool add(const char* name, Body body) {
  cases().push_back({name, body});
  return true;
}

void fail(const char* file, int line, const std::string& what) {
  failures.fetch_add(1);
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
}

}  // namespace check

// Usage: test_x [name part]
int main(int argc, char** argv) {
  int bad = 0;
  int run = 0;
  for (const check::Case& c : check::cases()) {
    if (argc > 1 && std::strstr(c.name, argv[1]) == nullptr) continue;
    ++run;
    const int before = check::failures.load();
    try {
      c.body();
    } catch (const check::Abandon&) {
    } catch (const std::exception& e) {
      check::fail(c.name, 0, std::string("unexpected exception: ") + e.what());
    }
    const bool ok = check::failures.load() == before;
    bad += ok ? 0 : 1;
    std::printf("%s %s\n", ok ? "ok  " : "FAIL", c.name);
    std::fflush(stdout);
  }
  std::printf("%d run, %d failed\n", run, bad);
  return bad == 0 && run > 0 ? 0 : 1;
}
