# SPDX-License-Identifier: BSD-3-Clause
"""The parts of tools/conformance: what is promised, which tests name it, and what became of them.

acceptance.py reads the list of promises, spec_comments.py what tests say that they prove,
listed_tests.py which tests ctest would run, test_results.py what came of those that ran. None
includes another but for the types; tools/conformance puts them together. ctest.py is what
tools/run_tests and tools/flakes share.
"""
