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

var update = flag.Bool("update", false, "write deploy/k8s/overlays/monitoring/prometheusrule.yaml from deploy/monitoring/alerts.yaml")

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
		if err := os.WriteFile(ruleFile, []byte(text.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if diff := cmp.Diff(text.String(), string(readFile(t, ruleFile))); diff != "" {
		t.Errorf("%s is not made of %s, alerts -, rule +: run go test . -run TestPrometheusRule -update\n%s", ruleFile, alertsFile, diff)
	}
	var plain monitoringv1.PrometheusRuleSpec
	if err := yaml.UnmarshalStrict([]byte(alerts), &plain); err != nil {
		t.Fatal(err)
	}
	for name, m := range map[string]manifests{"kustomize": kustomize(t, "k8s/overlays/monitoring"), "helm": helm(t, "monitoring: {enabled: true}")} {
		if diff := cmp.Diff(plain, object[monitoringv1.PrometheusRule](t, m, "weir").Spec); diff != "" || len(plain.Groups) == 0 {
			t.Errorf("%s: alerts -, rule +:\n%s", name, diff)
		}
		if got := object[corev1.ConfigMap](t, m, "weir-dashboard").Data["weir.json"]; strings.TrimSpace(got) != strings.TrimSpace(string(readFile(t, "monitoring/dashboard.json"))) {
			t.Errorf("%s: the dashboard is another one", name)
		}
	}
}

// Prometheus finds the nodes by the Service for callers, at a port that it has, by the scheme that the port speaks, and may
// reach it.
func TestServiceMonitor(t *testing.T) {
	for name, c := range map[string]struct{ nodes, monitoring manifests }{
		"kustomize":             {kustomize(t, "k8s/base"), kustomize(t, "k8s/overlays/monitoring-tls")},
		"kustomize development": {kustomize(t, "k8s/overlays/development"), kustomize(t, "k8s/overlays/monitoring")},
		"kustomize production":  {kustomize(t, "k8s/overlays/production"), kustomize(t, "k8s/overlays/monitoring-tls")},
	} {
		t.Run(name, func(t *testing.T) {
			monitor, service := object[monitoringv1.ServiceMonitor](t, c.monitoring, "weir"), object[corev1.Service](t, c.nodes, "weir")
			if !labels.SelectorFromSet(monitor.Spec.Selector.MatchLabels).Matches(labels.Set(service.Labels)) {
				t.Errorf("%v does not select the Service with %v", monitor.Spec.Selector, service.Labels)
			}
			if job := service.Labels[monitor.Spec.JobLabel]; job != "weir" {
				t.Errorf("the job is %q; the alerts have tests for weir", job)
			}
			if len(monitor.Spec.Endpoints) != 1 {
				t.Fatalf("the endpoints are %+v", monitor.Spec.Endpoints)
			}
			e := monitor.Spec.Endpoints[0]
			ports := make(map[string]corev1.ServicePort)
			for _, p := range service.Spec.Ports {
				ports[p.Name] = p
			}
			if ports[e.Port].TargetPort.StrVal != "http" || e.Path != "/metrics" {
				t.Errorf("the endpoint is %s of port %s, the Service has %v", e.Path, e.Port, maps.Keys(ports))
			}
			s := podSettings(t, c.nodes.node(t))
			if tls := s["tls-cert-file"] != ""; tls != (e.Scheme != nil && e.Scheme.String() == "https") || tls != (e.TLSConfig != nil) {
				t.Errorf("the scheme is %v, the nodes' certificate %q", e.Scheme, s["tls-cert-file"])
			}
			if asked := s["access-file"] != ""; asked != (e.Authorization != nil) {
				t.Errorf("the authorization is %+v, the nodes' access file %q", e.Authorization, s["access-file"])
			}
		})
	}
}
