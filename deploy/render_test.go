// Package deploy holds the tests of what Weir is deployed with: the kustomizations, the chart, the image, Compose. They
// check the files against each other, against the Kubernetes types and against the binary.
package deploy

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	monitoringv1 "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	appsv1 "k8s.io/api/apps/v1"
	autoscalingv2 "k8s.io/api/autoscaling/v2"
	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	policyv1 "k8s.io/api/policy/v1"
	utilyaml "k8s.io/apimachinery/pkg/util/yaml"
	"sigs.k8s.io/json"
	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
	"sigs.k8s.io/yaml"
)

// kinds are the kinds of objects that may be deployed, as the API's own types.
var kinds = map[string]func() any{
	"apps/v1 StatefulSet":                     func() any { return new(appsv1.StatefulSet) },
	"autoscaling/v2 HorizontalPodAutoscaler":  func() any { return new(autoscalingv2.HorizontalPodAutoscaler) },
	"networking.k8s.io/v1 NetworkPolicy":      func() any { return new(networkingv1.NetworkPolicy) },
	"policy/v1 PodDisruptionBudget":           func() any { return new(policyv1.PodDisruptionBudget) },
	"monitoring.coreos.com/v1 PrometheusRule": func() any { return new(monitoringv1.PrometheusRule) },
	"monitoring.coreos.com/v1 ServiceMonitor": func() any { return new(monitoringv1.ServiceMonitor) },
	"v1 Secret":         func() any { return new(corev1.Secret) },
	"v1 ConfigMap":      func() any { return new(corev1.ConfigMap) },
	"v1 Service":        func() any { return new(corev1.Service) },
	"v1 ServiceAccount": func() any { return new(corev1.ServiceAccount) },
}

// manifests are the objects that would be applied together.
type manifests struct {
	// typed has each object in its own type, by kind and name: "Service weir-headless".
	typed map[string]any
	// plain has the same as what was written.
	plain map[string]map[string]any
}

// decode reads objects as strictly as the API server can: a field that the kind has not, has in another spelling, or is
// given twice fails the test.
func decode(t *testing.T, text []byte) manifests {
	t.Helper()
	m := manifests{typed: make(map[string]any), plain: make(map[string]map[string]any)}
	for docs := utilyaml.NewYAMLReader(bufio.NewReader(bytes.NewReader(text))); ; {
		doc, err := docs.Read()
		if errors.Is(err, io.EOF) {
			return m
		}
		noError(t, err)
		var plain map[string]any
		if strictly(t, doc, &plain); plain == nil {
			continue // nothing but a comment
		}
		kind, _ := plain["kind"].(string)
		version, _ := plain["apiVersion"].(string)
		make, ok := kinds[version+" "+kind]
		must(t, ok, "%s %s is none of the kinds %q", version, kind, slices.Sorted(maps.Keys(kinds)))
		object := make()
		strictly(t, doc, object)
		meta, _ := plain["metadata"].(map[string]any)
		name, _ := meta["name"].(string)
		expect(t, meta["namespace"] == nil, "%s %s names a namespace: who applies it says where it goes", kind, name)
		key := kind + " " + name
		expect(t, m.typed[key] == nil, "there are two of %s", key)
		m.typed[key], m.plain[key] = object, plain
	}
}

func strictly(t *testing.T, doc []byte, v any) {
	t.Helper()
	data, err := yaml.YAMLToJSONStrict(doc)
	must(t, err == nil, "%v in:\n%s", err, doc)
	mistakes, err := json.UnmarshalStrict(data, v)
	err = errors.Join(append(mistakes, err)...)
	must(t, err == nil, "%v in:\n%s", err, doc)
}

// object returns the one object of its type that has the name.
func object[T any](t *testing.T, m manifests, name string) *T {
	t.Helper()
	var found *T
	for key, o := range m.typed {
		if v, ok := o.(*T); ok && strings.HasSuffix(key, " "+name) {
			found = v
		}
	}
	must(t, found != nil, "there is no %T %s among %q", found, name, slices.Sorted(maps.Keys(m.typed)))
	return found
}

// node returns the one container of the StatefulSet's pods.
func (m manifests) node(t *testing.T) corev1.Container {
	t.Helper()
	pod := object[appsv1.StatefulSet](t, m, "weir").Spec.Template.Spec
	must(t, len(pod.Containers) == 1 && len(pod.InitContainers) == 0,
		"%d containers and %d before them, want one alone", len(pod.Containers), len(pod.InitContainers))
	return pod.Containers[0]
}

// kustomize does what kubectl kustomize does.
func kustomize(t *testing.T, dir string) manifests {
	t.Helper()
	built, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	noError(t, err)
	text := value(built.AsYaml())(t)
	return decode(t, text)
}

// installations are all that a user can apply and that has nodes in it.
func installations(t *testing.T) map[string]manifests {
	t.Helper()
	return map[string]manifests{
		"kustomize base":        kustomize(t, "k8s/base"),
		"kustomize development": kustomize(t, "k8s/overlays/development"),
		"kustomize production":  kustomize(t, "k8s/overlays/production"),
		"kustomize persistence": persistent(t, "k8s/overlays/production"),
		"helm":                  helm(t),
		"helm development":      helm(t, valuesFile(t, "values-development.yaml")),
		"helm production":       helm(t, valuesFile(t, "values-production.yaml")),
	}
}

// persistent is an overlay with the component of volumes.
func persistent(t *testing.T, overlay string) manifests {
	t.Helper()
	dir := t.TempDir()
	here, err := filepath.Abs(".")
	noError(t, err)
	here, err = filepath.Rel(dir, here)
	noError(t, err)
	text := fmt.Sprintf("resources: [%s/%s]\ncomponents: [%[1]s/k8s/components/persistence]\n", here, overlay)
	noError(t, os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600))
	return kustomize(t, dir)
}

// Each file is read by a kustomization, and none says anything twice, which kustomize would not mind.
func TestFiles(t *testing.T) {
	read := make(map[string]bool)
	err := filepath.WalkDir("k8s", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.Name() != "kustomization.yaml" {
			return err
		}
		var k struct {
			APIVersion string   `json:"apiVersion"`
			Kind       string   `json:"kind"`
			Resources  []string `json:"resources"`
			Patches    []struct {
				Path string `json:"path"`
			} `json:"patches"`
			Images []struct {
				Name    string `json:"name"`
				NewName string `json:"newName"`
				NewTag  string `json:"newTag"`
			} `json:"images"`
		}
		strictly(t, readFile(t, path), &k)
		dir := filepath.Dir(path)
		for _, r := range k.Resources {
			read[filepath.Join(dir, r)] = true
		}
		for _, p := range k.Patches {
			read[filepath.Join(dir, p.Path)] = true
		}
		read[path] = true
		return nil
	})
	noError(t, err)
	err = filepath.WalkDir("k8s", func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		expect(t, read[path], "%s is part of no kustomization", path)
		_, err = yaml.YAMLToJSONStrict(readFile(t, path))
		return err
	})
	expect(t, err == nil, "%v", err)
}
