package deploy

import (
	"bytes"
	"fmt"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"
)

const chartDir = "helm/weir"

// values reads YAML as helm does: later ones over earlier ones.
func values(t *testing.T, texts ...string) map[string]any {
	t.Helper()
	all := make(map[string]any)
	for _, text := range texts {
		v, err := chartutil.ReadValues([]byte(text))
		noError(t, err)
		all = chartutil.CoalesceTables(v, all)
	}
	return all
}

// loadChart reads the chart once: it says each time that it follows its links.
var loadChart = sync.OnceValues(func() (*chart.Chart, error) { return loader.Load(chartDir) })

// render does what helm template does, without the chart's notes.
func render(release string, vals map[string]any) ([]byte, error) {
	c, err := loadChart()
	if err != nil {
		return nil, err
	}
	full, err := chartutil.ToRenderValues(c, vals,
		chartutil.ReleaseOptions{Name: release, Namespace: "weir", Revision: 1, IsInstall: true}, nil)
	if err != nil {
		return nil, err
	}
	files, err := engine.Engine{Strict: true}.Render(c, full)
	if err != nil {
		return nil, err
	}
	var all bytes.Buffer
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if filepath.Ext(name) == ".yaml" {
			all.WriteString("---\n" + files[name] + "\n")
		}
	}
	return all.Bytes(), nil
}

// helm decodes what the chart makes of values, for the release weir.
func helm(t *testing.T, texts ...string) manifests {
	t.Helper()
	text, err := render("weir", values(t, texts...))
	noError(t, err)
	return decode(t, text)
}

func valuesFile(t *testing.T, name string) string {
	t.Helper()
	return string(readFile(t, filepath.Join(chartDir, name)))
}

// ownSecrets has the chart make no Secrets.
const ownSecrets = "secrets: {generate: false}"

// A release named weir is what kustomize makes, object by object, but for the labels that charts have.
func TestChartIsTheKustomization(t *testing.T) {
	monitored := "monitoring: {enabled: true}"
	for name, c := range map[string]struct {
		values []string
		dirs   []string
	}{
		"base": {[]string{ownSecrets}, []string{"k8s/base"}},
		"development": {[]string{valuesFile(t, "values-development.yaml")},
			[]string{"k8s/overlays/development"}},
		"production": {[]string{valuesFile(t, "values-production.yaml")},
			[]string{"k8s/overlays/production"}},
		"base with monitoring": {[]string{ownSecrets, monitored}, []string{"k8s/base", "k8s/overlays/monitoring-tls"}},
		"development with monitoring": {
			[]string{valuesFile(t, "values-development.yaml"), monitored},
			[]string{"k8s/overlays/development", "k8s/overlays/monitoring"},
		},
		"production with monitoring": {
			[]string{valuesFile(t, "values-production.yaml"), monitored},
			[]string{"k8s/overlays/production", "k8s/overlays/monitoring-tls"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			want := make(map[string]map[string]any)
			for _, dir := range c.dirs {
				maps.Copy(want, kustomize(t, dir).plain)
			}
			got := helm(t, c.values...).plain
			diff := cmp.Diff(alike(t, want), alike(t, got))
			expect(t, diff == "", "kustomize -, helm +:\n%s", diff)
		})
	}
}

// alike takes out what may differ: the labels that charts have, and the order of what has names.
func alike(t *testing.T, v any) any {
	t.Helper()
	switch v := v.(type) {
	case map[string]map[string]any:
		all := make(map[string]any)
		for k, o := range v {
			all[k] = alike(t, o)
		}
		return all
	case map[string]any:
		all := make(map[string]any)
		for k, e := range v {
			switch k {
			case "app.kubernetes.io/instance", "app.kubernetes.io/managed-by", "helm.sh/chart":
				continue
			}
			all[k] = alike(t, e)
		}
		return all
	case []any:
		all := make([]any, len(v))
		for i, e := range v {
			all[i] = alike(t, e)
		}
		slices.SortStableFunc(all, func(a, b any) int { return strings.Compare(nameOf(a), nameOf(b)) })
		return all
	}
	return v
}

func nameOf(v any) string {
	m, _ := v.(map[string]any)
	name, _ := m["name"].(string)
	return name
}

// Another release in the same namespace has nothing in common with the first one.
func TestChartNames(t *testing.T) {
	for release, want := range map[string]string{"weir": "weir", "limits": "limits-weir", "my-weir": "my-weir"} {
		text, err := render(release, values(t, valuesFile(t, "values-production.yaml"), "monitoring: {enabled: true}"))
		noError(t, err)
		m := decode(t, text)
		set := object[appsv1.StatefulSet](t, m, want)
		expect(t, set.Spec.Selector.MatchLabels["app.kubernetes.io/instance"] == release,
			"%s: pods are selected by %v", release, set.Spec.Selector.MatchLabels)
		join := podSettings(t, set.Spec.Template.Spec.Containers[0])["join"]
		expect(t, join == want+"-headless:7946" && set.Spec.ServiceName == want+"-headless",
			"%s: nodes join %s, the Service is %s", release, join, set.Spec.ServiceName)
		for key := range m.typed {
			_, name, _ := strings.Cut(key, " ")
			expect(t, strings.HasPrefix(name, want), "%s: there is a %s", release, key)
		}
		_, ok := m.typed["ConfigMap "+set.Spec.Template.Spec.Volumes[0].ConfigMap.Name]
		expect(t, ok, "%s: there is no ConfigMap %s", release, set.Spec.Template.Spec.Volumes[0].ConfigMap.Name)
	}
}

// What values say arrives.
func TestChartValues(t *testing.T) {
	m := helm(t, `
image: {repository: r, tag: t, pullPolicy: Always}
imagePullSecrets: [{name: pull}]
replicas: 5
settings: {max-keys: 10000000, no-inline: true, grace: 20s, timeout: 500ms}
env: {GODEBUG: gctrace=1}
policies: "policies:\n  - name: other\n    algorithm: sliding_log\n    limit: 1\n    window: 1m\n"
preStopSeconds: 3
networkPolicy: {enabled: false}
nodeSelector: {disk: none}
tolerations: [{key: a, operator: Exists}]
affinity: {nodeAffinity: {}}
priorityClassName: high
podAnnotations: {a: b}
`)
	set, c := object[appsv1.StatefulSet](t, m, "weir"), m.node(t)
	pod := set.Spec.Template.Spec
	s := podSettings(t, c)
	s.takes(t)
	expect(t, c.Image == "r:t" && c.ImagePullPolicy == corev1.PullAlways && *set.Spec.Replicas == 5 &&
		pod.ImagePullSecrets[0].Name == "pull" && s["max-keys"] == "10000000" && s["no-inline"] == "true" &&
		s["timeout"] == "500ms" && s["voters"] == "ordinals:3" && *pod.TerminationGracePeriodSeconds == 38 &&
		c.Lifecycle.PreStop.Sleep.Seconds == 3 && pod.NodeSelector["disk"] == "none" && pod.Tolerations[0].Key == "a" &&
		pod.Affinity.NodeAffinity != nil && pod.PriorityClassName == "high" &&
		set.Spec.Template.Annotations["a"] == "b", "the StatefulSet is %+v", set)
	expect(t, slices.Contains(c.Env, corev1.EnvVar{Name: "GODEBUG", Value: "gctrace=1"}), "the environment is %+v",
		c.Env)
	text := object[corev1.ConfigMap](t, m, "weir-policies").Data["policies.yaml"]
	expect(t, strings.Contains(text, "name: other") && !strings.Contains(text, "login"), "the policies are\n%s", text)
	_, ok := m.typed["NetworkPolicy weir"]
	expect(t, !ok, "there is a NetworkPolicy")
	extra := helm(t, "networkPolicy: {egress: true, egressExtra: [{ports: [{port: 4317}]}]}")
	np := object[networkingv1.NetworkPolicy](t, extra, "weir")
	expect(t, np.Spec.Egress[len(np.Spec.Egress)-1].Ports[0].Port.IntValue() == 4317, "egress is %+v", np.Spec.Egress)
}

// The Redis protocol is off unless it is asked for, and then everywhere where callers come in.
func TestChartRESP(t *testing.T) {
	for _, on := range []bool{false, true} {
		m := helm(t, fmt.Sprintf("resp: {enabled: %t}", on))
		s := podSettings(t, m.node(t))
		s.takes(t)
		named := 0
		for _, p := range m.node(t).Ports {
			if p.Name == "resp" && p.ContainerPort == 6380 {
				named++
			}
		}
		for _, p := range object[corev1.Service](t, m, "weir").Spec.Ports {
			if p.Port == 6380 && p.TargetPort.StrVal == "resp" {
				named++
			}
		}
		for _, rule := range object[networkingv1.NetworkPolicy](t, m, "weir").Spec.Ingress {
			for _, p := range rule.Ports {
				if p.Port.StrVal == "resp" {
					named++
				}
			}
		}
		if want := map[bool]int{false: 0, true: 3}[on]; named != want || (s["resp-port"] == "6380") != on {
			t.Errorf("enabled %t: the port is named in %d places of 3; the setting is %q", on, named, s["resp-port"])
		}
	}
}

// What gateways need arrives: files for Envoy as files, the rest as settings.
func TestChartGateways(t *testing.T) {
	const file = "domain: shop\ndescriptors:\n  - key: user\n    rate_limit: {unit: minute, requests_per_unit: 5}\n"
	m := helm(t, fmt.Sprintf(
		"envoy: {files: {shop.yaml: %q}}\nsettings: {audit-log: stderr, trusted-proxies: \"10.0.0.0/8,fd00::/8\", forward-auth-headers: X-User}", file))
	s := podSettings(t, m.node(t))
	s.takes(t)
	volume, _ := mounted(t, m, s["envoy-config"]+"/shop.yaml")
	must(t, volume.ConfigMap != nil, "the files of --envoy-config %s are not mounted", s["envoy-config"])
	got := object[corev1.ConfigMap](t, m, volume.ConfigMap.Name).Data["shop.yaml"]
	expect(t, strings.TrimSpace(got) == strings.TrimSpace(file), "the file is %q", got)
	expect(t, s["audit-log"] == "stderr" && s["trusted-proxies"] == "10.0.0.0/8,fd00::/8" &&
		s["forward-auth-headers"] == "X-User", "the settings are %q", s)
}

// A volume for overrides and counters is one for each pod, which the node may write to.
func TestDataVolumes(t *testing.T) {
	chart := helm(t, "persistence: {enabled: true, size: 1Gi, storageClass: fast}")
	for name, m := range map[string]manifests{"chart": chart, "component": persistent(t, "k8s/overlays/development")} {
		s := podSettings(t, m.node(t))
		s.takes(t)
		claims := object[appsv1.StatefulSet](t, m, "weir").Spec.VolumeClaimTemplates
		must(t, len(claims) == 1 && claims[0].Spec.Resources.Requests.Storage().String() == "1Gi",
			"%s: the claims are %+v", name, claims)
		expect(t, slices.ContainsFunc(m.node(t).VolumeMounts, func(mount corev1.VolumeMount) bool {
			return mount.MountPath == s["data-dir"] && mount.Name == claims[0].Name && !mount.ReadOnly
		}), "%s: --data-dir %s is not on the claim", name, s["data-dir"])
	}
	class := object[appsv1.StatefulSet](t, chart, "weir").Spec.VolumeClaimTemplates[0].Spec.StorageClassName
	expect(t, *class == "fast", "the storage class is %s", *class)
}

// Wrong values are refused, with their names.
func TestChartSchema(t *testing.T) {
	for text, want := range map[string]string{
		"replica: 3":                            "replica",
		"replicas: three":                       "replicas",
		"image: {tags: a}":                      "tags",
		"persistence: {enabled: true, size: 0}": "size",
		"settings: {grace: 1m}":                 "grace",
		"settings: {http-port: 80}":             "http-port",
		"settings: {resp-port: 80}":             "resp-port",
		"settings: {envoy-config: /a}":          "envoy-config",
		"envoy: {files: {a.txt: b}}":            "a.txt",
		"resp: {port: 80}":                      "port",
		"settings: {Max_Keys: 1}":               "Max_Keys",
		"env: {WEIR_GRACE: 1s}":                 "WEIR_GRACE",
		"policies: [{name: a}]":                 "policies",
		"tls: {secretName: A_B}":                "secretName",
		"networkPolicy: {callers: []}":          "callers",
		"networkPolicy: {callers: [{}]}":        "callers",
		"autoscaling: {targetCPU: 0}":           "targetCPU",
		"monitoring: {interval: often}":         "interval",
		"topologySpreadConstraints: [{a: 1}]":   "topologySpreadConstraints",
		"fullnameOverride: -weir":               "fullnameOverride",
		"peerTLS: {name: \"\", secretName: a}":  "name",
	} {
		if out, err := render("weir", values(t, text)); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: the error is %v, want one that names %s; rendered:\n%.300s", text, err, want, out)
		}
	}
}

func TestChartLint(t *testing.T) {
	for _, name := range []string{"values.yaml", "values-development.yaml", "values-production.yaml"} {
		l := lint.All(chartDir, values(t, valuesFile(t, name)), "weir", true)
		for _, m := range l.Messages {
			expect(t, m.Severity <= support.InfoSev, "%s: %v", name, m)
		}
	}
}

// Every value is documented, in values.yaml by a default, and in the README.
func TestChartReadme(t *testing.T) {
	var defaults map[string]any
	noError(t, yaml.Unmarshal(readFile(t, filepath.Join(chartDir, "values.yaml")), &defaults))
	readme := valuesFile(t, "README.md")
	for name := range defaults {
		expect(t, strings.Contains(readme, "`"+name), "README.md does not mention %s", name)
	}
	var schema struct {
		Properties map[string]any `json:"properties"`
	}
	noError(t, yaml.Unmarshal(readFile(t, filepath.Join(chartDir, "values.schema.json")), &schema))
	delete(schema.Properties, "global") // which helm itself adds
	want, got := slices.Sorted(maps.Keys(defaults)), slices.Sorted(maps.Keys(schema.Properties))
	expect(t, slices.Equal(want, got), "values.yaml has %q, the schema %q", want, got)
}

// Every flag of weir run is a setting, or the chart sets it itself; --config is neither, since everything in such a
// file would be.
func TestChartFlags(t *testing.T) {
	own := map[string]bool{"config": true}
	settings := values(t, valuesFile(t, "values.yaml"))["settings"].(map[string]any)
	for _, text := range []string{"insecure: true", "resp: {enabled: true}\nenvoy: {files: {a.yaml: \"domain: a\"}}"} {
		for flag := range podSettings(t, helm(t, text).node(t)) {
			if _, given := settings[flag]; !given {
				own[flag] = true
			}
		}
	}
	help, err := runWeir(t, "run", "--help")
	noError(t, err)
	known := make(map[string]bool)
	for _, m := range regexp.MustCompile(`(?m)^ +(?:-\w, )?--([a-z0-9-]+)`).FindAllStringSubmatch(help, -1) {
		flag := m[1]
		if known[flag] = true; flag == "help" || flag == "grace" { // whose values have another form
			continue
		}
		text, err := render("weir", values(t, fmt.Sprintf("settings: {%s: given}", flag)))
		switch {
		case own[flag]:
			expect(t, err != nil, "--%s is the chart's own, and a setting, too", flag)
		case err != nil:
			t.Errorf("--%s cannot be given: %v", flag, err)
		case podSettings(t, decode(t, text).node(t))[flag] != "given":
			t.Errorf("--%s does not arrive", flag)
		}
	}
	must(t, len(known) >= 50, "weir run --help shows %d flags:\n%s", len(known), help)
	for flag := range own {
		expect(t, known[flag], "the chart sets --%s, which weir run does not have", flag)
	}
}
