"""A schema of the fields of Kubernetes and KubeRay (ray.io/v1) that `cluster_configs/` uses.

Written by hand after KubeRay's Go types and the Kubernetes API reference: not KubeRay's own CRD,
which is larger and is not part of any package here. Whatever the files do not use is an unknown
field, so that a misspelt one is seen.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "boolean"}
NAME: Schema = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "maxLength": 63}
QUANTITY: Schema = {"type": "string", "pattern": "^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}


def fields(required: str = "", **properties: Schema) -> Schema:
    """Returns the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "required": required.split(),
        "properties": properties,
        "additionalProperties": False,
    }


def many(items: Schema, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


METADATA = fields("name", name=NAME, namespace=NAME, labels=TEXTS)
AMOUNTS = {"type": "object", "additionalProperties": QUANTITY}
RESOURCES = fields("limits requests", limits=AMOUNTS, requests=AMOUNTS)
ENV = many(fields("name value", name=TEXT, value=TEXT))
CONTAINER = fields(
    "name image resources",
    name=NAME,
    image=TEXT,
    env=ENV,
    ports=many(fields("containerPort", containerPort=COUNT, name=NAME)),
    resources=RESOURCES,
    lifecycle=fields(
        preStop=fields("exec", exec=fields("command", command=many(TEXT, 1))),
    ),
    volumeMounts=many(fields("name mountPath", name=NAME, mountPath=TEXT)),
)
VOLUME = fields(
    "name",
    name=NAME,
    emptyDir=fields("medium", medium={"const": "Memory"}, sizeLimit=QUANTITY),
    persistentVolumeClaim=fields("claimName", claimName=NAME),
)
POD = fields(
    "containers",
    containers=many(CONTAINER, 1),
    volumes=many(VOLUME),
    serviceAccountName=NAME,
    securityContext=fields(fsGroup=COUNT),
    terminationGracePeriodSeconds=COUNT,
    restartPolicy={"enum": ["Always", "OnFailure", "Never"]},
    nodeSelector=TEXTS,
    tolerations=many(
        fields(
            "key operator effect",
            key=TEXT,
            operator={"enum": ["Equal", "Exists"]},
            value=TEXT,
            effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
        )
    ),
)
TEMPLATE = fields("spec", spec=POD)
CLUSTER = fields(
    "rayVersion headGroupSpec workerGroupSpecs",
    rayVersion=TEXT,
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        resources=RESOURCES,
    ),
    headGroupSpec=fields("rayStartParams template", rayStartParams=TEXTS, template=TEMPLATE),
    workerGroupSpecs=many(
        fields(
            "groupName minReplicas maxReplicas rayStartParams template",
            groupName=NAME,
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            rayStartParams=TEXTS,
            template=TEMPLATE,
        ),
        1,
    ),
)

SCHEMAS: dict[str, Schema] = {
    "RayJob": fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": "RayJob"},
        metadata=METADATA,
        spec=fields(
            "entrypoint rayClusterSpec",
            entrypoint=TEXT,
            shutdownAfterJobFinishes=FLAG,
            ttlSecondsAfterFinished=COUNT,
            backoffLimit=COUNT,
            rayClusterSpec=CLUSTER,
        ),
    ),
    "PersistentVolumeClaim": fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": "v1"},
        kind={"const": "PersistentVolumeClaim"},
        metadata=METADATA,
        spec=fields(
            "accessModes storageClassName resources",
            # Why this one alone: what only one node can mount is no storage for a run of several.
            accessModes={"const": ["ReadWriteMany"]},
            storageClassName=TEXT,
            resources=fields("requests", requests=fields("storage", storage=QUANTITY)),
        ),
    ),
}
