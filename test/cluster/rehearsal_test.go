package clustertest

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v4"

	"github.com/weirlimit/weir/test/checker"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// step is a part of a rehearsal: what was done, and what came of it.
type step struct {
	name     string
	from, to int64
}

// begin waits until the pods that there are to be are ready, and begins to ask by way of the Service.
func (k *kubernetes) begin() {
	k.t.Helper()
	began := time.Now()
	k.awaitReady()
	ready := time.Since(began)
	members := k.members()
	k.fleet.calm(members...)
	k.fleet.decided(members[0], "probe-strict")
	k.t.Logf("start of %d pods: all ready after %v, strict policies decided after %v", len(members),
		ready.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	for _, m := range members {
		n := k.names.questions(m.ip)
		expect.True(k.t, n != 0, "%s has not asked the DNS for the headless Service", m.name)
	}
	k.mu.Lock()
	k.load = startLoad(k.fleet)
	k.load.ask(k.callable...)
	k.mu.Unlock()
	k.load.bite()
}

// awaitReady waits until as many pods are ready as there are to be, and no others are left.
func (k *kubernetes) awaitReady() time.Duration {
	k.t.Helper()
	return k.await(3*time.Minute, "the pods that are to be there are ready", func() bool {
		return k.unready() == 0 && len(k.present()) == k.replicas
	})
}

// perform carries out a step under load. In a planned one nothing may fail, and nobody may say that it is ready and not
// decide; in another one that may be so until do returns.
func (k *kubernetes) perform(name string, planned bool, do func()) {
	k.t.Helper()
	l := k.load
	s := &step{name: name, from: l.now()}
	k.steps = append(k.steps, s)
	do()
	done := l.now()
	settled := k.fleet.calm(k.members()...)
	l.bite()
	s.to = l.now()
	k.awaitNames()
	available, strict := l.tellFailures(name, s.from, s.to)
	k.t.Logf("%s: took %v, calm %v later; the slowest answer took %v", name,
		time.Duration(done-s.from).Round(time.Millisecond),
		settled.Round(time.Millisecond), l.slowest(s.from, s.to).Round(time.Millisecond))
	if len(l.suspicions()) > 0 {
		return
	}
	excused := done
	if planned {
		excused = s.from
		expect.True(k.t, available+strict <= 0,
			"%s: %d requests failed although all went in good order", name, available+strict)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	for _, lapse := range k.lapses {
		expect.True(k.t, lapse.at < excused,
			"%s: at %s %s said that it was ready and did not decide %d of what it was asked", name, l.clock(lapse.at),
			lapse.pod.name, lapse.undecided)
	}
	k.lapses = nil
}

// finish ends the load and has everything judged.
func (k *kubernetes) finish() {
	k.t.Helper()
	l := k.load
	l.end()
	for _, s := range k.steps {
		h := l.history(k.suffered)
		h.Operations = slices.DeleteFunc(h.Operations,
			func(op checker.Operation) bool { return op.Sent < s.from-int64(loadWindow) || op.Sent > s.to })
		var excess []string
		for _, p := range h.Policies {
			excess = append(excess, fmt.Sprintf("%s %d", p.Name, checker.Check(h).Excess[p.Name]))
		}
		k.t.Logf("%s: of one key at most beyond the limit: %s", s.name, strings.Join(excess, ", "))
	}
	if len(l.suspicions()) == 0 {
		for _, p := range k.fleet.started {
			expect.True(k.t, !strings.Contains(p.stderr.String(), "alone: no other member is there"),
				"%s went on alone though there were others", p.name)
		}
	}
	l.judge(k.suffered)
}

// update replaces all pods, one by one.
func (k *kubernetes) update() {
	k.t.Helper()
	k.mu.Lock()
	k.absent = 0
	k.mu.Unlock()
	k.revision++
	took := k.await(5*time.Minute, "the update is complete", func() bool {
		pods := k.present()
		for _, p := range pods {
			if p.revision != k.revision {
				return false
			}
		}
		return k.unready() == 0 && len(pods) == k.replicas
	})
	// What the manifests have it wait, and half a minute for each pod to leave, to come and to be seen as ready.
	each := time.Duration(k.node.Lifecycle.PreStop.Sleep.Seconds)*time.Second +
		time.Duration(k.set.Spec.MinReadySeconds)*time.Second + 30*time.Second
	most := time.Duration(k.replicas) * each
	expect.True(k.t, took <= most, "the update took %v, more than %v", took, most)
	k.mu.Lock()
	defer k.mu.Unlock()
	expect.True(k.t, k.absent <= 1, "%d pods were not ready at once while they were replaced one by one", k.absent)
}

// scale changes how many pods there are to be.
func (k *kubernetes) scale(replicas int) {
	k.t.Helper()
	k.mu.Lock()
	k.replicas = replicas
	k.mu.Unlock()
	k.awaitReady()
}

// lose kills a pod as when its machine is lost, and waits until all it held is decided and another one is in its place.
func (k *kubernetes) lose(ordinal int) {
	k.t.Helper()
	p := k.present()[ordinal]
	rest := slices.DeleteFunc(k.members(), func(m *member) bool { return m == p.member })
	alive := k.load.gone(p.member)
	k.crashed(p, k.kill(p))
	k.load.tellDecided(rest[0])
	k.awaitReady()
	alive()
	if next := k.present()[ordinal]; next.name != p.name || next.ip == p.ip {
		k.t.Errorf("%s at %s came back as %s at %s", p.name, p.ip, next.name, next.ip)
	}
}

// drain evicts pods, all at once as far as the PodDisruptionBudget lets it.
func (k *kubernetes) drain(ordinals ...int) {
	k.t.Helper()
	k.mu.Lock()
	k.absent = 0
	k.mu.Unlock()
	pods := k.present()
	var left []*pod
	for _, ordinal := range ordinals {
		left = append(left, pods[ordinal])
	}
	refused := 0
	k.await(5*time.Minute, "all that are to be evicted have been replaced", func() bool {
		left = slices.DeleteFunc(left, k.evict)
		if len(left) > 0 {
			refused++
			return false
		}
		return k.unready() == 0 && len(k.present()) == k.replicas
	})
	k.mu.Lock()
	defer k.mu.Unlock()
	expect.True(k.t, refused != 0 && k.absent <= 1,
		"%d evictions were refused, %d pods were not ready at once", refused, k.absent)
}

// overstay deletes a pod whose process stands still when it is told to end, and is killed when its grace time is over.
func (k *kubernetes) overstay(ordinal int) {
	k.t.Helper()
	p := k.present()[ordinal]
	rest := slices.DeleteFunc(k.members(), func(m *member) bool { return m == p.member })
	alive := k.load.gone(p.member)
	p.hangs = true
	k.delete(p)
	<-p.hung
	k.crashed(p, k.load.now())
	k.load.tellDecided(rest[0])
	k.awaitReady()
	alive()
}

// restartUnnamed replaces a pod while the DNS does not answer, for longer than a node waits for seeds that are silent.
// It must not take itself for the whole cluster.
func (k *kubernetes) restartUnnamed(ordinal int) {
	k.t.Helper()
	old := k.present()[ordinal]
	k.names.outage(true)
	k.delete(old)
	k.await(2*time.Minute, "a pod has looked for the others for 20 s", func() bool {
		p := k.present()[ordinal]
		if p == nil || p == old {
			return false
		}
		must.True(k.t, !k.saysReady(p), "%s says that it is ready, without having found anybody", p.name)
		return time.Since(p.started) > 20*time.Second
	})
	k.names.outage(false)
	k.awaitReady()
}

func (k *kubernetes) crashed(p *pod, at int64) {
	k.suffered.crashes = append(k.suffered.crashes, checker.Crash{At: at, Node: p.name, Copied: true})
}

// TestRehearsal does with the manifests of deploy/k8s what Kubernetes does with them every other day: pods that find
// one another by name, an update, the loss of a pod.
func TestRehearsal(t *testing.T) {
	needsQuiet(t)
	plainOnly(t)
	// The least that CoreDNS comes with; and time enough for an answer when other packages' tests have the processors.
	k := newKubernetes(t, 5*time.Second, variable{Name: "WEIR_TIMEOUT", Value: "5s"})
	k.begin()
	k.perform("rolling update", true, k.update)
	k.perform("a pod is lost", false, func() { k.lose(1) })
	k.finish()
}

// TestRehearsalOfTrouble is the rest: pods that come and go by the dozen, machines that are emptied, and what goes
// wrong.
func TestRehearsalOfTrouble(t *testing.T) {
	plainOnly(t)
	survival(t)
	k := newKubernetes(t, 30*time.Second) // as long as CoreDNS keeps answers where kubeadm of before 1.32 has set it up
	k.begin()
	k.perform("scale to 5", true, func() { k.scale(5) })
	k.perform("scale to 3", true, func() { k.scale(3) })
	k.perform("two machines are drained", true, func() { k.drain(0, 1) })
	k.perform("a pod restarts without DNS", true, func() { k.restartUnnamed(1) })
	k.perform("a pod does not end", false, func() { k.overstay(2) })
	k.finish()
}

// What a rehearsal needs to know of the manifests in deploy/k8s/base. That these are right in the eyes of Kubernetes is
// tested there, in a module that has its types; this one does without them.
type (
	statefulSet struct {
		Metadata struct{ Name string }
		Spec     struct {
			ServiceName         string `yaml:"serviceName"`
			Replicas            int
			PodManagementPolicy string `yaml:"podManagementPolicy"`
			MinReadySeconds     int    `yaml:"minReadySeconds"`
			Template            struct{ Spec podSpec }
		}
	}
	podSpec struct {
		TerminationGracePeriodSeconds int `yaml:"terminationGracePeriodSeconds"`
		SecurityContext               struct {
			RunAsUser  int `yaml:"runAsUser"`
			RunAsGroup int `yaml:"runAsGroup"`
		} `yaml:"securityContext"`
		Containers []container
	}
	container struct {
		Args  []string
		Env   []variable
		Ports []struct {
			Name          string
			ContainerPort int `yaml:"containerPort"`
		}
		StartupProbe   probe `yaml:"startupProbe"`
		LivenessProbe  probe `yaml:"livenessProbe"`
		ReadinessProbe probe `yaml:"readinessProbe"`
		Lifecycle      struct {
			PreStop struct{ Sleep struct{ Seconds int } } `yaml:"preStop"`
		}
		VolumeMounts []struct {
			MountPath string `yaml:"mountPath"`
		} `yaml:"volumeMounts"`
	}
	variable struct {
		Name, Value string
		ValueFrom   struct {
			FieldRef struct {
				FieldPath string `yaml:"fieldPath"`
			} `yaml:"fieldRef"`
		} `yaml:"valueFrom"`
	}
	probe struct {
		HTTPGet struct {
			Path, Port string
		} `yaml:"httpGet"`
		PeriodSeconds    int `yaml:"periodSeconds"`
		TimeoutSeconds   int `yaml:"timeoutSeconds"`
		FailureThreshold int `yaml:"failureThreshold"`
	}
	disruptionBudget struct {
		Spec struct {
			MaxUnavailable int `yaml:"maxUnavailable"`
		}
	}
	configMap struct{ Data map[string]string }
)

// manifest reads one of them.
func manifest[T any](t *testing.T, file string) (v T) {
	t.Helper()
	data := must.Value(os.ReadFile(filepath.Join("../../deploy/k8s/base", file)))(t)
	must.NoError(t, yaml.NewDecoder(bytes.NewReader(data)).Decode(&v), "%s", file)
	return v
}
