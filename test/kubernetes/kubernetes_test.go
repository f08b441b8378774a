package kubernetestest

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var (
	kubeconfig = flag.String("kubeconfig", "",
		"the cluster to use, as kubectl reads it; without one the test is skipped")
	image     = flag.String("image", "weir:dev", "the image of weir, which the cluster's nodes have")
	manifests = flag.String("manifests", "../../deploy/k8s/overlays/development",
		"the kustomization to apply; callers must need no certificate and no token")
	dns     = flag.String("dns", "", "HOST:PORT of the cluster's DNS (default: the Service kube-dns)")
	only    = flag.String("steps", "", "which steps, separated by commas (default all)")
	longest = flag.Duration("longest", 0,
		"the test fails when a check waits longer during a planned step; 0: how long they wait is only printed")
	rate = flag.Int("rate", 400, "checks a second, of all clients together")
)

// calm is how long the first step is, in which nothing happens: what others are compared with.
const calm = 30 * time.Second

// set is the name of the StatefulSet, and the label of its pods; headless is its Service.
const (
	set      = "weir"
	headless = "weir-headless"
)

// cluster is a namespace of a Kubernetes cluster with Weir in it.
type cluster struct {
	t         *testing.T
	namespace string
}

// run returns what kubectl prints; the error has what it says.
func (c *cluster) run(ctx context.Context, input string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, "kubectl",
		append([]string{"--kubeconfig", *kubeconfig, "-n", c.namespace}, args...)...)
	var out, said bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &out, &said
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, said.String())
	}
	return strings.TrimSpace(out.String()), nil
}

// kubectl is run, for what must not fail.
func (c *cluster) kubectl(args ...string) string {
	c.t.Helper()
	out := must.Value(c.run(c.t.Context(), "", args...))(c.t)
	return out
}

// pod is what matters here of a pod.
type pod struct {
	Metadata struct {
		Name, UID         string
		DeletionTimestamp string
	}
	Status struct {
		PodIP      string
		Conditions []struct{ Type, Status string }
	}
}

func (p *pod) ready() bool {
	for _, c := range p.Status.Conditions {
		if c.Type == "Ready" {
			return c.Status == "True" && p.Metadata.DeletionTimestamp == ""
		}
	}
	return false
}

// pods returns the pods by name.
func (c *cluster) pods() []pod {
	c.t.Helper()
	var list struct{ Items []pod }
	must.NoError(c.t, json.Unmarshal([]byte(c.kubectl("get", "pods", "-l", "app.kubernetes.io/name="+set, "-o",
		"json")), &list))
	slices.SortFunc(list.Items, func(a, b pod) int { return strings.Compare(a.Metadata.Name, b.Metadata.Name) })
	return list.Items
}

// await looks every half second until ok, for 3 minutes at most.
func (c *cluster) await(what string, ok func() bool) {
	c.t.Helper()
	tick := time.NewTicker(500 * time.Millisecond)
	defer tick.Stop()
	for until := time.Now().Add(3 * time.Minute); !ok(); <-tick.C {
		if time.Now().After(until) {
			c.t.Fatalf("waited in vain until %s:\n%s", what, c.kubectl("get", "pods,events", "-o", "wide"))
		}
	}
}

// awaitPods waits until there are n pods, all of them ready, and none of those in gone.
func (c *cluster) awaitPods(n int, gone ...pod) {
	c.t.Helper()
	c.await(fmt.Sprintf("%d pods are ready", n), func() bool {
		list := c.pods()
		for _, p := range list {
			if !p.ready() || slices.ContainsFunc(gone, func(g pod) bool { return g.Metadata.UID == p.Metadata.UID }) {
				return false
			}
		}
		return len(list) == n
	})
}

// newCluster applies the manifests with the test's policies in a new namespace, and waits until three pods are ready.
func newCluster(t *testing.T) *cluster {
	t.Helper()
	if *kubeconfig == "" {
		t.Skip("no cluster: give -kubeconfig, and run this where pods' addresses are reached, such as on a node")
	}
	if _, err := exec.LookPath("kubectl"); err != nil {
		t.Skip("no kubectl on this machine")
	}
	c := &cluster{t: t, namespace: fmt.Sprintf("weir-test-%d", os.Getpid())}
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := c.run(ctx, "", "get", "--raw", "/version"); err != nil {
		t.Skipf("the cluster is not reached: %v", err)
	}
	c.kubectl("create", "namespace", c.namespace)
	t.Cleanup(func() {
		_, err := c.run(context.Background(), "", "delete", "namespace", c.namespace, "--wait=true")
		expect.NoError(t, err)
	})
	dir := must.Value(filepath.EvalSymlinks(t.TempDir()))(t)
	from, err := filepath.Abs(*manifests)
	if err == nil {
		from, err = filepath.Rel(dir, from) // kustomize takes no absolute path
	}
	must.NoError(t, err)
	name, tag := *image, "latest"
	if i := strings.LastIndexByte(name, ':'); i > strings.LastIndexByte(name, '/') { // otherwise a registry's port
		name, tag = name[:i], name[i+1:]
	}
	kustomization := fmt.Sprintf(
		"resources: [%q]\nimages: [{name: weir, newName: %q, newTag: %q}]\npatches: [{path: policies.yaml}]\n", from,
		name, tag)
	configMap := fmt.Sprintf(
		"apiVersion: v1\nkind: ConfigMap\nmetadata: {name: weir-policies}\ndata:\n  policies.yaml: |\n    %s\n",
		strings.ReplaceAll(policies(), "\n", "\n    "))
	for file, text := range map[string]string{"kustomization.yaml": kustomization, "policies.yaml": configMap} {
		must.NoError(t, os.WriteFile(filepath.Join(dir, file), []byte(text), 0o600))
	}
	c.kubectl("apply", "-k", dir)
	c.kubectl("rollout", "status", "statefulset/"+set, "--timeout=3m")
	return c
}

// resolver returns the address of the cluster's DNS.
func (c *cluster) resolver() string {
	if *dns != "" {
		return *dns
	}
	return net.JoinHostPort(c.kubectl("-n", "kube-system", "get", "service", "kube-dns", "-o",
		"jsonpath={.spec.clusterIP}"), "53")
}

// service returns HOST:PORT of a port of the Service for callers.
func (c *cluster) service(port string) string {
	ip := c.kubectl("get", "service", set, "-o", "jsonpath={.spec.clusterIP}")
	_, err := netip.ParseAddr(ip)
	must.NoError(c.t, err)
	return net.JoinHostPort(ip, port)
}

// evict asks for the eviction of a pod until its PodDisruptionBudget lets it go.
func (c *cluster) evict(p pod) {
	c.t.Helper()
	body := fmt.Sprintf(`{"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": %q, "namespace": %q}}`,
		p.Metadata.Name, c.namespace)
	path := fmt.Sprintf("/api/v1/namespaces/%s/pods/%s/eviction", c.namespace, p.Metadata.Name)
	c.await("the budget lets "+p.Metadata.Name+" go", func() bool {
		_, err := c.run(c.t.Context(), body, "create", "--raw", path, "-f", "-")
		must.True(c.t, err == nil || strings.Contains(err.Error(), "disruption budget"), "%v", err)
		return err == nil
	})
}

// TestPlannedSteps: while pods are restarted, added, removed, deleted and evicted, no check of a key with room is
// refused, none fails, and no key is admitted more often than its limit lets through.
func TestPlannedSteps(t *testing.T) {
	c := newCluster(t)
	l := startLoad(t, c)
	defer l.judge() // also of a test that a step ends
	defer l.stop()
	steps := []struct {
		name string
		do   func()
	}{
		{"nothing", func() { l.wait(calm) }},
		{"rollout restart", func() {
			before := c.pods()
			c.kubectl("rollout", "restart", "statefulset/"+set)
			c.kubectl("rollout", "status", "statefulset/"+set, "--timeout=5m")
			c.awaitPods(3, before...)
		}},
		{"scale to 5", func() {
			c.kubectl("scale", "statefulset/"+set, "--replicas=5")
			c.awaitPods(5)
		}},
		{"scale to 3", func() {
			for _, n := range []int{4, 3} { // one by one, as deploy/k8s/README.md has it
				c.kubectl("scale", "statefulset/"+set, fmt.Sprintf("--replicas=%d", n))
				c.awaitPods(n)
				l.wait(5 * time.Second)
			}
		}},
		{"scale to 5 again", func() {
			c.kubectl("scale", "statefulset/"+set, "--replicas=5")
			c.awaitPods(5)
		}},
		{"scale to 3 at once", func() {
			c.kubectl("scale", "statefulset/"+set, "--replicas=3")
			c.awaitPods(3)
		}},
		{"delete a pod", func() {
			p := c.pods()[1]
			c.kubectl("delete", "pod", p.Metadata.Name, "--wait=false")
			c.awaitPods(3, p)
		}},
		{"evict all", func() {
			before := c.pods()
			for _, p := range before {
				c.evict(p)
			}
			c.awaitPods(3, before...)
		}},
	}
	for _, s := range steps {
		if *only != "" && s.name != "nothing" && !slices.Contains(strings.Split(*only, ","), s.name) {
			continue
		}
		l.begin(s.name)
		s.do()
		l.wait(5 * time.Second)
	}
}
