package deploy

import (
	"flag"
	"maps"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/labels"
	"sigs.k8s.io/yaml"
)

var update = flag.Bool("update", false,
	"write deploy/k8s/overlays/monitoring/prometheusrule.yaml from deploy/monitoring/alerts.yaml")

const (
	alertsFile = "monitoring/alerts.yaml"
	ruleFile   = "k8s/overlays/monitoring/prometheusrule.yaml"
	ruleHead   = `# From deploy/monitoring/alerts.yaml: go test . -run TestPrometheusRule -update
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: weir
  labels:
    app.kubernetes.io/name: weir
spec:
`
)

// The operator has the alerts of the plain file, which has tests.
func TestPrometheusRule(t *testing.T) {
	alerts := string(readFile(t, alertsFile))
	var text strings.Builder
	text.WriteString(ruleHead)
	for line := range strings.Lines(alerts[strings.Index(alerts, "groups:"):]) {
		if strings.TrimSpace(line) != "" {
			line = "  " + line
		}
		text.WriteString(line)
	}
	if *update {
		noError(t, os.WriteFile(ruleFile, []byte(text.String()), 0o644))
	}
	diff := cmp.Diff(text.String(), string(readFile(t, ruleFile)))
	expect(t, diff == "", "%s is not made of %s, alerts -, rule +: run go test . -run TestPrometheusRule -update\n%s",
		ruleFile, alertsFile, diff)
	var plain monitoringv1.PrometheusRuleSpec
	noError(t, yaml.UnmarshalStrict([]byte(alerts), &plain))
	for name, m := range map[string]manifests{"kustomize": kustomize(t, "k8s/overlays/monitoring"),
		"helm": helm(t, "monitoring: {enabled: true}")} {
		diff := cmp.Diff(plain, object[monitoringv1.PrometheusRule](t, m, "weir").Spec)
		expect(t, diff == "" && len(plain.Groups) != 0, "%s: alerts -, rule +:\n%s", name, diff)
		got := object[corev1.ConfigMap](t, m, "weir-dashboard").Data["weir.json"]
		expect(t, strings.TrimSpace(got) == strings.TrimSpace(string(readFile(t, "monitoring/dashboard.json"))),
			"%s: the dashboard is another one", name)
	}
}

// Prometheus finds the nodes by the Service for callers, at a port that it has, by the scheme that the port speaks, and
// may reach it.
func TestServiceMonitor(t *testing.T) {
	for name, c := range map[string]struct{ nodes, monitoring manifests }{
		"kustomize":             {kustomize(t, "k8s/base"), kustomize(t, "k8s/overlays/monitoring-tls")},
		"kustomize development": {kustomize(t, "k8s/overlays/development"), kustomize(t, "k8s/overlays/monitoring")},
		"kustomize production":  {kustomize(t, "k8s/overlays/production"), kustomize(t, "k8s/overlays/monitoring-tls")},
	} {
		t.Run(name, func(t *testing.T) {
			monitor, service := object[monitoringv1.ServiceMonitor](t, c.monitoring, "weir"),
				object[corev1.Service](t, c.nodes, "weir")
			expect(t, labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels).Matches(labels.Set(service.Labels)),
				"%v does not select the Service with %v", monitor.Spec.Selector, service.Labels)
			job := service.Labels[monitor.Spec.JobLabel]
			expect(t, job == "weir", "the job is %q; the alerts have tests for weir", job)
			must(t, len(monitor.Spec.Endpoints) == 1, "the endpoints are %+v", monitor.Spec.Endpoints)
			e := monitor.Spec.Endpoints[0]
			ports := make(map[string]corev1.ServicePort)
			for _, p := range service.Spec.Ports {
				ports[p.Name] = p
			}
			expect(t, ports[e.Port].TargetPort.StrVal == "http" && e.Path == "/metrics",
				"the endpoint is %s of port %s, the Service has %v", e.Path, e.Port, maps.Keys(ports))
			s := podSettings(t, c.nodes.node(t))
			tls := s["tls-cert-file"] != ""
			expect(t, tls == (e.Scheme != nil && e.Scheme.String() == "https") && tls == (e.TLSConfig != nil),
				"the scheme is %v, the nodes' certificate %q", e.Scheme, s["tls-cert-file"])
			if asked := s["access-file"] != ""; asked != (e.Authorization != nil) {
				t.Errorf("the authorization is %+v, the nodes' access file %q", e.Authorization, s["access-file"])
			}
		})
	}
}
