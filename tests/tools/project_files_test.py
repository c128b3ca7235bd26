# SPDX-License-Identifier: BSD-3-Clause
"""The files that GitHub reads: the forms, the workflow and what else is for contributors."""

import pathlib
import re
import sys
import unittest

import tomllib

ROOT = pathlib.Path(__file__).resolve().parents[2]
# MUSTER_CHECKS=ON tools/setup puts them there. Their Python part serves any version of Python.
sys.path += map(str, ROOT.glob(".cache/checks/lib/python3.*/site-packages"))
try:
    import yaml
except ImportError:
    yaml = None
READS_YAML = unittest.skipUnless(yaml, "needs PyYAML, which MUSTER_CHECKS=ON tools/setup brings")

GITHUB = ROOT / ".github"
FORMS = GITHUB / "ISSUE_TEMPLATE"
KINDS = {"markdown", "textarea", "input", "dropdown", "checkboxes"}


def read(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


class ProjectFiles(unittest.TestCase):
    # spec: V11.forms GitHub shows a form for a bug and one for a feature, and no empty one
    @READS_YAML
    def test_forms(self):
        self.assertIs(read(FORMS / "config.yml")["blank_issues_enabled"], False)
        for name, wanted in (
            ("bug", {"happened", "program", "start", "size", "versions", "doctor"}),
            ("feature", {"need", "shape", "torch"}),
        ):
            form = read(FORMS / f"{name}.yml")
            self.assertLessEqual({"name", "description", "body"}, set(form))
            self.assertIn(name, form["labels"])
            asked = [part for part in form["body"] if part["type"] != "markdown"]
            self.assertLessEqual({part["type"] for part in form["body"]}, KINDS)
            self.assertEqual(len(asked), len({part["id"] for part in asked}))
            for part in asked:
                self.assertTrue(part["attributes"]["label"])
                if part["type"] in ("dropdown", "checkboxes"):
                    self.assertTrue(part["attributes"]["options"], part["id"])
            required = {part["id"] for part in asked if part.get("validations", {}).get("required")}
            self.assertEqual(required, wanted)

    # spec: V11.forms the bug's form sends reports of holes to SECURITY.md, and asks for no secret
    @READS_YAML
    def test_bug_form_keeps_secrets(self):
        parts = read(FORMS / "bug.yml")["body"]
        self.assertIn("SECURITY.md", parts[0]["attributes"]["value"])
        (sure,) = parts[-1]["attributes"]["options"]
        self.assertIn("No secret", sure["label"])
        self.assertTrue(sure["required"])

    # spec: V11.forms the workflow runs .ci/run on Debian 12, for each change, with all history
    @READS_YAML
    def test_workflow_runs_what_ci_runs(self):
        workflow = read(GITHUB / "workflows/ci.yml")
        events = workflow[True]  # YAML 1.1 reads `on` so
        self.assertIn("pull_request", events)
        self.assertEqual(events["push"]["branches"], ["main"])
        self.assertEqual(workflow["permissions"], {"contents": "read"})
        (job,) = workflow["jobs"].values()
        self.assertEqual(job["container"]["image"], "debian:12")
        commands = [step["run"].strip() for step in job["steps"] if "run" in step]
        self.assertEqual(commands[-1], ".ci/run")
        self.assertTrue((ROOT / ".ci/run").stat().st_mode & 0o100)
        (checkout,) = [
            step for step in job["steps"] if step.get("uses", "").startswith("actions/checkout@")
        ]
        self.assertEqual(checkout["with"]["fetch-depth"], 0)
        for step in job["steps"]:
            self.assertEqual(len({"run", "uses"} & set(step)), 1)
            if "uses" in step:
                self.assertRegex(step["uses"], r"^actions/[\w-]+@v\d+$")

    # spec: V11.forms CITATION.cff has the keys of CFF 1.2 and the version of the sources
    @READS_YAML
    def test_citation(self):
        cited = read(ROOT / "CITATION.cff")
        self.assertLessEqual({"cff-version", "message", "title", "authors"}, set(cited))
        self.assertEqual((cited["cff-version"], cited["type"]), ("1.2.0", "software"))
        self.assertEqual(cited["license"], "BSD-3-Clause")
        self.assertTrue(all(author.get("name") for author in cited["authors"]))
        built = re.search(r"project\(muster VERSION (\S+)", (ROOT / "CMakeLists.txt").read_text())
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        self.assertEqual(cited["version"], built[1])
        self.assertEqual(cited["version"], project["version"])

    # spec: V11.forms what the pull-request template, the owners and the conduct page name exists
    def test_what_they_name_exists(self):
        template = (GITHUB / "pull_request_template.md").read_text()
        for name in re.findall(r"[\w./-]+\.md|\.ci/run|tools/\w+", template):
            self.assertTrue((ROOT / name).is_file(), name)
        for line in (GITHUB / "CODEOWNERS").read_text().splitlines():
            if line and not line.startswith("#"):
                pattern, *owners = line.split()
                self.assertTrue(owners)
                for owner in owners:
                    self.assertRegex(owner, r"^@[\w-]+(/[\w-]+)?$")
                if pattern != "*":
                    self.assertTrue((ROOT / pattern.lstrip("/")).exists(), pattern)
        conduct = (ROOT / "CODE_OF_CONDUCT.md").read_text()
        self.assertIn("Contributor Covenant, version 2.1", conduct)

    def test_versions_are_those_that_the_build_asks_for(self):
        page = (ROOT / "docs/user/compatibility.md").read_text(encoding="utf-8")
        rows = dict(re.findall(r"^\| (\w+) \| ([\w.+]+) \|", page, re.M))
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())
        self.assertEqual(project["project"]["requires-python"], f">={rows['Python']}")
        provider = (ROOT / "tools/wheel/fitting_torch.py").read_text(encoding="utf-8")
        self.assertIn(f'OLDEST = "{rows["torch"]}"', provider)
        cmake = (ROOT / "CMakeLists.txt").read_text()
        self.assertIn(f"cmake_minimum_required(VERSION {rows['CMake']})", cmake)

    # spec: V11.forms the changelog has a section for the version, with the headings of a release
    def test_changelog(self):
        text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        version, _, section = text.partition("\n## ")[2].partition("\n")
        self.assertRegex(version, rf"^{re.escape(project['version'])} \((unreleased|20[\d-]+)\)$")
        section = section.partition("\n## ")[0]
        headings = re.findall(r"^### (.+)$", section, re.M)
        self.assertEqual(headings[0], "Added")
        self.assertLessEqual(
            set(headings),
            {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security", "Known limits"},
        )


if __name__ == "__main__":
    unittest.main()
