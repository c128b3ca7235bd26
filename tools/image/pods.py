# SPDX-License-Identifier: BSD-3-Clause
"""The pods that an object of Kubernetes of the kind Job starts, as processes."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Pod:
    hostname: str
    domain: str  # the service's, in namespace `default`
    variables: dict  # beside those that the image has
    entrypoint: tuple | None  # the image's, if None
    arguments: tuple

    @property
    def address(self):
        return f"{self.hostname}.{self.domain}"


def pods(job, secret):
    """Those of an Indexed Job, with this value for what it takes from a secret."""
    wanted, template = job["spec"], job["spec"]["template"]["spec"]
    assert wanted["completionMode"] == "Indexed", wanted
    (container,) = template["containers"]
    name = job["metadata"]["name"]
    made = []
    for index in range(wanted["completions"]):
        variables = {"JOB_COMPLETION_INDEX": str(index), "KUBERNETES_SERVICE_HOST": "10.96.0.1"}
        for variable in container.get("env", []):
            origin = variable.get("valueFrom", {})
            assert "value" in variable or "secretKeyRef" in origin, variable
            variables[variable["name"]] = variable.get("value", secret)
        made.append(
            Pod(
                f"{name}-{index}",
                f"{template['subdomain']}.default.svc.cluster.local",
                variables,
                tuple(container["command"]) if "command" in container else None,
                tuple(container.get("args", ())),
            )
        )
    return made


def hosts(of, address="127.0.0.1"):
    """/etc/hosts of pods that all run on this machine, in place of the service's names."""
    rows = ["127.0.0.1 localhost", *(f"{address} {pod.address} {pod.hostname}" for pod in of)]
    return "\n".join(rows) + "\n"
