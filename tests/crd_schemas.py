"""What the chart may say in resources whose kinds a cluster learns from others: written from their API references.

Only what the chart uses is listed, so a misspelt or misplaced key fails.
"""

from __future__ import annotations

from typing import Any


def _closed(required: str = "", **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def _list_of(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "minItems": 1, "items": item}


TEXT: dict[str, Any] = {"type": "string", "minLength": 1}
COUNT: dict[str, Any] = {"type": "integer", "minimum": 0}
DURATION: dict[str, Any] = {"type": "string", "pattern": r"^(\d+(h|m|s))+$"}
LABELS: dict[str, Any] = {"type": "object", "additionalProperties": {"type": "string"}}
ISSUER = _closed("name", name=TEXT, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=TEXT)

_RULE = {
    **_closed("expr", record=TEXT, alert=TEXT, expr=TEXT, labels=LABELS, annotations=LABELS, **{"for": DURATION}),
    "oneOf": [{"required": ["record"]}, {"required": ["alert"]}],
}
_RELABELING = _closed("targetLabel", sourceLabels=_list_of(TEXT), targetLabel=TEXT, replacement=TEXT)
_TRIGGER = _closed(
    "type name metadata",
    type={"const": "prometheus"},
    name=TEXT,
    metricType={"enum": ["Value", "AverageValue"]},
    metadata=_closed(
        "serverAddress query threshold",
        serverAddress=TEXT,
        query=TEXT,
        threshold={"type": "string", "pattern": r"^[\d.]+$"},
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)

SPECS: dict[str, tuple[str, dict[str, Any]]] = {
    "PodMonitor": (
        "monitoring.coreos.com/v1",
        _closed(
            "selector podMetricsEndpoints",
            selector=_closed("matchLabels", matchLabels=LABELS),
            podMetricsEndpoints=_list_of(
                _closed("port", port=TEXT, interval=DURATION, relabelings=_list_of(_RELABELING))
            ),
        ),
    ),
    "PrometheusRule": (
        "monitoring.coreos.com/v1",
        _closed("groups", groups=_list_of(_closed("name rules", name=TEXT, interval=DURATION, rules=_list_of(_RULE)))),
    ),
    "Issuer": (
        "cert-manager.io/v1",
        {
            **_closed("", selfSigned=_closed(), ca=_closed("secretName", secretName=TEXT)),
            "minProperties": 1,
            "maxProperties": 1,
        },
    ),
    "Certificate": (
        "cert-manager.io/v1",
        {
            **_closed(
                "secretName issuerRef",
                secretName=TEXT,
                issuerRef=ISSUER,
                isCA={"type": "boolean"},
                commonName={"type": "string", "minLength": 1, "maxLength": 64},
                dnsNames=_list_of(TEXT),
                ipAddresses=_list_of(TEXT),
                duration=DURATION,
                renewBefore=DURATION,
                usages=_list_of({"enum": ["digital signature", "server auth", "client auth"]}),
                privateKey=_closed(
                    "", algorithm={"enum": ["ECDSA", "RSA"]}, size=COUNT, rotationPolicy={"enum": ["Always", "Never"]}
                ),
            ),
            "anyOf": [{"required": ["dnsNames"]}, {"required": ["isCA"]}],
        },
    ),
    "ScaledObject": (
        "keda.sh/v1alpha1",
        _closed(
            "scaleTargetRef triggers",
            scaleTargetRef=_closed("name", name=TEXT, kind=TEXT, apiVersion=TEXT),
            minReplicaCount=COUNT,
            maxReplicaCount=COUNT,
            pollingInterval=COUNT,
            cooldownPeriod=COUNT,
            fallback=_closed(
                "failureThreshold replicas",
                failureThreshold=COUNT,
                replicas=COUNT,
                behavior={"enum": ["static", "currentReplicas", "currentReplicasIfHigher", "currentReplicasIfLower"]},
            ),
            advanced=_closed(
                "",
                horizontalPodAutoscalerConfig={"type": "object"},
                scalingModifiers=_closed(
                    "formula target", formula=TEXT, target=TEXT, metricType={"enum": ["Value", "AverageValue"]}
                ),
            ),
            triggers=_list_of(_TRIGGER),
        ),
    ),
}
"""API version and schema of `spec`, by kind."""


def manifest(kind: str) -> dict[str, Any]:
    """The schema of a whole resource of that kind."""
    version, spec = SPECS[kind]
    metadata = _closed("name namespace labels", name=TEXT, namespace=TEXT, labels=LABELS, annotations=LABELS)
    return _closed(
        "apiVersion kind metadata spec",
        apiVersion={"const": version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )
