// SPDX-License-Identifier: BSD-3-Clause
/// For a test in one wing that uses what another wing registers.
#pragma once

#include <gtest/gtest.h>

#ifdef MUSTER_SOME_WINGS
#define NEEDS_ALL_WINGS() GTEST_SKIP() << "this build lacks a wing that the test uses"
#else
#define NEEDS_ALL_WINGS() static_cast<void>(0)
#endif
