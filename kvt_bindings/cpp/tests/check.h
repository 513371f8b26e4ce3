// The tests' own small harness: TEST(name) { CHECK(...); } and one executable per file.
// A failed CHECK marks the test and goes on; a failed REQUIRE leaves it.
#pragma once

#include <cstdio>
#include <sstream>
#include <string>

namespace check {

using Body = void (*)();
bool add(const char* name, Body body);
void fail(const char* file, int line, const std::string& what);

struct Abandon {};  // thrown by REQUIRE

template <class T>
std::string show(const T& value) {
  if constexpr (requires(std::ostringstream& s) { s << value; }) {
    std::ostringstream s;
    s << value;
    return s.str();
  } else if constexpr (requires { static_cast<long long>(value); }) {
    return std::to_string(static_cast<long long>(value));
  } else {
    return "(value)";
  }
}

template <class A, class B>
bool equal(const A& a, const B& b, const char* text, const char* file, int line) {
  if (a == b) return true;
  fail(file, line, std::string(text) + ": " + show(a) + " != " + show(b));
  return false;
}

}  // namespace check

#define TEST(name)                                                                  \
  static void test_##name();                                                        \
  [[maybe_unused]] static const bool added_##name = check::add(#name, test_##name); \
  static void test_##name()
#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) check::fail(__FILE__, __LINE__, #condition); \
  } while (0)
#define CHECK_EQ(a, b) (void)check::equal((a), (b), #a " == " #b, __FILE__, __LINE__)
#define REQUIRE(condition)                         \
  do {                                             \
    if (!(condition)) {                            \
      check::fail(__FILE__, __LINE__, #condition); \
      throw check::Abandon{};                      \
    }                                              \
  } while (0)
#define CHECK_THROWS(type, expression)                                          \
  do {                                                                          \
    bool thrown = false;                                                        \
    try {                                                                       \
      (void)(expression);                                                       \
    } catch (const type&) {                                                     \
      thrown = true;                                                            \
    }                                                                           \
    if (!thrown) check::fail(__FILE__, __LINE__, #expression " throws " #type); \
  } while (0)
