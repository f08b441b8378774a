// Package k8s holds the tests of the manifests beside it.
package k8s

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"

	"github.com/weirlimit/weir/policy"
)

// kustomization is what kustomization.yaml uses of kustomize's own type.
type kustomization struct {
	metav1.TypeMeta `json:",inline"`
	Resources       []string `json:"resources"`
	Images          []struct {
		Name    string `json:"name"`
		NewName string `json:"newName"`
		NewTag  string `json:"newTag"`
	} `json:"images"`
}

// read decodes a manifest as strictly as the API server can: a field that T has not, has in another spelling, or is given
// twice fails the test.
func read[T any](t *testing.T, file string) T {
	t.Helper()
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	data, err = yaml.YAMLToJSONStrict(data)
	if err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	var v T
	mistakes, err := json.UnmarshalStrict(data, &v)
	if err := errors.Join(append(mistakes, err)...); err != nil {
		t.Fatalf("%s: %v", file, err)
	}
	return v
}

func statefulSet(t *testing.T) appsv1.StatefulSet {
	return read[appsv1.StatefulSet](t, "statefulset.yaml")
}

// node returns the one container of the StatefulSet's pods.
func node(t *testing.T) corev1.Container {
	t.Helper()
	pod := statefulSet(t).Spec.Template.Spec
	if len(pod.Containers) != 1 {
		t.Fatalf("%d containers, want 1", len(pod.Containers))
	}
	return pod.Containers[0]
}

// Every manifest is of the kind that its file says, and is part of the kustomization.
func TestDecode(t *testing.T) {
	want := func(file string, m metav1.TypeMeta, apiVersion, kind string) {
		if m.APIVersion != apiVersion || m.Kind != kind {
			t.Errorf("%s: %s %s, want %s %s", file, m.APIVersion, m.Kind, apiVersion, kind)
		}
	}
	want("statefulset.yaml", statefulSet(t).TypeMeta, "apps/v1", "StatefulSet")
	want("policies.yaml", read[corev1.ConfigMap](t, "policies.yaml").TypeMeta, "v1", "ConfigMap")
	for _, file := range []string{"service.yaml", "service-headless.yaml"} {
		want(file, read[corev1.Service](t, file).TypeMeta, "v1", "Service")
	}
	k := read[kustomization](t, "kustomization.yaml")
	want("kustomization.yaml", k.TypeMeta, "kustomize.config.k8s.io/v1beta1", "Kustomization")

	files, err := filepath.Glob("*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	files = slices.DeleteFunc(files, func(f string) bool { return f == "kustomization.yaml" })
	if slices.Sort(k.Resources); !slices.Equal(k.Resources, files) {
		t.Errorf("resources are %q, the files are %q", k.Resources, files)
	}
	if len(k.Images) != 1 || k.Images[0].Name != node(t).Image || k.Images[0].NewTag == "" {
		t.Errorf("images %+v do not name the container's image %q", k.Images, node(t).Image)
	}
}

func TestSelectors(t *testing.T) {
	set := statefulSet(t)
	pod := set.Spec.Template.Labels
	selectors := map[string]*metav1.LabelSelector{"StatefulSet": set.Spec.Selector}
	for i, c := range set.Spec.Template.Spec.TopologySpreadConstraints {
		selectors[fmt.Sprintf("topologySpreadConstraints[%d]", i)] = c.LabelSelector
	}
	for _, file := range []string{"service.yaml", "service-headless.yaml"} {
		selectors[file] = metav1.SetAsLabelSelector(read[corev1.Service](t, file).Spec.Selector)
	}
	for name, s := range selectors {
		sel, err := metav1.LabelSelectorAsSelector(s)
		if err != nil || sel.Empty() || !sel.Matches(labels.Set(pod)) {
			t.Errorf("%s: the selector %q does not match the pods' labels %v (%v)", name, sel, pod, err)
		}
	}
}

func TestServices(t *testing.T) {
	container := make(map[string]corev1.ContainerPort)
	for _, p := range node(t).Ports {
		if _, twice := container[p.Name]; twice {
			t.Errorf("two ports are named %s", p.Name)
		}
		container[p.Name] = p
	}
	served := make(map[string]bool)
	for _, file := range []string{"service.yaml", "service-headless.yaml"} {
		for _, p := range read[corev1.Service](t, file).Spec.Ports {
			target, ok := container[p.TargetPort.StrVal]
			if p.TargetPort.Type != intstr.String || !ok || target.ContainerPort != p.Port || protocol(target.Protocol) != protocol(p.Protocol) {
				t.Errorf("%s: port %s leads to %+v", file, p.Name, target)
			}
			served[p.TargetPort.StrVal] = true
		}
	}
	if len(served) != len(container) {
		t.Errorf("Services serve %v of the container's ports %v", slices.Collect(maps.Keys(served)), slices.Collect(maps.Keys(container)))
	}

	set, headless := statefulSet(t), read[corev1.Service](t, "service-headless.yaml")
	if set.Spec.ServiceName != headless.Name || headless.Spec.ClusterIP != corev1.ClusterIPNone {
		t.Errorf("serviceName is %q, the headless Service %q with clusterIP %q", set.Spec.ServiceName, headless.Name, headless.Spec.ClusterIP)
	}
	if !headless.Spec.PublishNotReadyAddresses {
		t.Error("nodes that are not ready cannot be found")
	}
	if set.Spec.PodManagementPolicy != appsv1.ParallelPodManagement {
		t.Errorf("podManagementPolicy is %q", set.Spec.PodManagementPolicy)
	}
}

func protocol(p corev1.Protocol) corev1.Protocol {
	if p == "" {
		return corev1.ProtocolTCP
	}
	return p
}

func TestProbes(t *testing.T) {
	c := node(t)
	for name, want := range map[string]struct {
		probe *corev1.Probe
		path  string
	}{
		"startup": {c.StartupProbe, "/healthz"}, "liveness": {c.LivenessProbe, "/healthz"}, "readiness": {c.ReadinessProbe, "/readyz"},
	} {
		if want.probe == nil || want.probe.HTTPGet == nil || want.probe.HTTPGet.Path != want.path || want.probe.HTTPGet.Port.StrVal != "http" {
			t.Errorf("%s probe is %+v, want %s of port http", name, want.probe, want.path)
		}
	}
}

// Pods run under the Pod Security Standard "restricted", with nothing to write to.
func TestSecurity(t *testing.T) {
	pod, c := statefulSet(t).Spec.Template.Spec, node(t)
	if s := pod.SecurityContext; s == nil || s.RunAsNonRoot == nil || !*s.RunAsNonRoot || s.RunAsUser == nil || *s.RunAsUser == 0 ||
		s.SeccompProfile == nil || s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("the pod's security context is %+v", s)
	}
	if s := c.SecurityContext; s == nil || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation ||
		s.ReadOnlyRootFilesystem == nil || !*s.ReadOnlyRootFilesystem ||
		s.Capabilities == nil || !slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || len(s.Capabilities.Add) != 0 {
		t.Errorf("the container's security context is %+v", s)
	}
	if pod.AutomountServiceAccountToken == nil || *pod.AutomountServiceAccountToken {
		t.Error("pods get a token for the API server")
	}
	if pod.EnableServiceLinks == nil || *pod.EnableServiceLinks {
		t.Error("Services may set WEIR_ variables")
	}
	if c.Resources.Requests.Cpu().IsZero() || c.Resources.Requests.Memory().IsZero() || c.Resources.Limits.Memory().IsZero() {
		t.Errorf("the resources are %+v", c.Resources)
	}
}

// flag returns what the container's arguments say for a flag.
func flag(t *testing.T, name string) string {
	t.Helper()
	for _, a := range node(t).Args {
		if v, ok := strings.CutPrefix(a, "--"+name+"="); ok {
			return v
		}
	}
	t.Errorf("there is no --%s", name)
	return ""
}

func TestPolicies(t *testing.T) {
	pod, c := statefulSet(t).Spec.Template.Spec, node(t)
	config := read[corev1.ConfigMap](t, "policies.yaml")
	dir, key := filepath.Split(flag(t, "policies"))
	data, ok := config.Data[key]
	if !ok {
		t.Fatalf("--policies names %s, which is not in the ConfigMap", key)
	}
	set, err := policy.Parse(key, []byte(data))
	if err != nil {
		t.Fatal(err)
	}
	if len(set.Policies()) == 0 {
		t.Error("there is no sample policy")
	}

	if len(c.VolumeMounts) != 1 || filepath.Clean(dir) != c.VolumeMounts[0].MountPath {
		t.Fatalf("%s is not on the volume %+v", dir, c.VolumeMounts)
	}
	if m := c.VolumeMounts[0]; m.SubPath != "" || m.SubPathExpr != "" {
		t.Error("a file mounted by subPath never changes")
	}
	if len(pod.Volumes) != 1 || pod.Volumes[0].Name != c.VolumeMounts[0].Name || pod.Volumes[0].ConfigMap == nil || pod.Volumes[0].ConfigMap.Name != config.Name {
		t.Errorf("the volumes are %+v, want the ConfigMap %s", pod.Volumes, config.Name)
	}
}

var variable = regexp.MustCompile(`\$\(([^)]*)\)`)

// args returns the container's arguments as a pod would get them.
func args(t *testing.T) []string {
	t.Helper()
	fields := map[string]string{"metadata.name": "weir-0", "status.podIP": "10.0.0.1"}
	env := make(map[string]string)
	for _, e := range node(t).Env {
		if e.ValueFrom == nil || e.ValueFrom.FieldRef == nil || fields[e.ValueFrom.FieldRef.FieldPath] == "" {
			t.Errorf("the test does not know the value of %+v", e)
			continue
		}
		env[e.Name] = fields[e.ValueFrom.FieldRef.FieldPath]
	}
	var out []string
	used := make(map[string]bool)
	for _, a := range node(t).Args {
		out = append(out, variable.ReplaceAllStringFunc(a, func(s string) string {
			name := variable.FindStringSubmatch(s)[1]
			if env[name] == "" {
				t.Errorf("%s: there is no such variable", s)
			}
			used[name] = true
			return env[name]
		}))
	}
	if len(used) != len(env) {
		t.Errorf("of the variables %v only %v are used", env, used)
	}
	return out
}

func TestArguments(t *testing.T) {
	ports := make(map[string]string)
	for _, p := range node(t).Ports {
		ports[p.Name] = strconv.Itoa(int(p.ContainerPort))
	}
	for name, port := range map[string]string{
		"http-port": ports["http"], "grpc-port": ports["grpc"], "gossip-port": ports["gossip-tcp"], "peer-port": ports["peer"],
		"join": read[corev1.Service](t, "service-headless.yaml").Name + ":" + ports["gossip-tcp"],
	} {
		if v := flag(t, name); v != port {
			t.Errorf("--%s is %s, want %s", name, v, port)
		}
	}
	if ports["gossip-tcp"] != ports["gossip-udp"] {
		t.Error("gossip takes the same port of TCP and UDP")
	}
}

// The binary knows every flag and takes every value. With --help last it reads them all, and then does nothing.
func TestFlagsOfTheBinary(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"run", "../../cmd/node"}, append(args(t), "--help")...)...)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%s: %v\n%s", strings.Join(cmd.Args, " "), err, out)
	}
}

// The image is built for what the pods ask of it.
func TestDockerfile(t *testing.T) {
	data, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("../../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	release := regexp.MustCompile(`(?m)^go (\d+\.\d+)`).FindSubmatch(mod)
	if release == nil || !strings.Contains(string(data), " golang:"+string(release[1])+" ") {
		t.Errorf("the Dockerfile does not build with the Go of go.mod, %s", release)
	}
	var exposed, user []string
	for line := range strings.Lines(string(data)) {
		switch f := strings.Fields(line); {
		case len(f) > 1 && f[0] == "EXPOSE":
			exposed = append(exposed, f[1:]...)
		case len(f) > 1 && f[0] == "USER":
			user = f[1:]
		}
	}
	var want []string
	for _, p := range node(t).Ports {
		want = append(want, fmt.Sprintf("%d/%s", p.ContainerPort, strings.ToLower(string(protocol(p.Protocol)))))
	}
	slices.Sort(exposed)
	if slices.Sort(want); !slices.Equal(exposed, want) {
		t.Errorf("the image exposes %q, the container's ports are %q", exposed, want)
	}
	s := statefulSet(t).Spec.Template.Spec.SecurityContext
	if id := fmt.Sprintf("%d:%d", *s.RunAsUser, *s.RunAsGroup); len(user) != 1 || user[0] != id {
		t.Errorf("the image runs as %q, the pods as %s", user, id)
	}
}
