package clustertest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

// kubernetes does with real processes what Kubernetes does with the manifests of deploy/k8s: the StatefulSet
// controller, which runs whenever the test waits for something (await); a kubelet for each pod, with its probes,
// preStop, SIGTERM and SIGKILL; the endpoints of the Service for callers, which the load keeps to; the names of the
// headless Service; evictions within the PodDisruptionBudget. A pod has a network namespace and an address that none
// had before; its /etc is what it would be in an image that has none, its user and its rights are those of the
// manifest.
//
// What it does not do: limit memory or CPU, and restart containers. A process that ends by itself, or would be
// restarted for its probes, fails the test.
type kubernetes struct {
	t      *testing.T
	set    statefulSet
	budget int // maxUnavailable
	config configMap
	node   container
	secret map[string][]byte // files of Secrets between nodes, by their paths under /run/secrets
	fleet  *fleet
	names  *names
	prober *http.Client
	probes []string // a key of each partition
	work   sync.WaitGroup

	// The test's own goroutine has these.
	revision  int // that pods are to have
	addresses int // given so far
	suffered  faults
	steps     []*step

	mu       sync.Mutex
	replicas int          // as many as there are to be
	pods     map[int]*pod // by ordinal
	load     *load        // nil before anybody asks
	changes  int          // of what endpoints and names depend on
	told     int          // the last of them that has got around
	callable []*member    // by way of the Service, as far as has got around
	absent   int          // the most pods that were not ready at a time, since a step began
	lapses   []lapse
}

// pod is one pod: a later one under the same name is another pod.
type pod struct {
	*member
	ordinal, revision int
	host              *namespace
	started           time.Time
	once              sync.Once
	deleted           chan struct{} // closed when it is to end
	gone              chan struct{} // closed when its process has ended and its address is nobody's
	hangs             bool          // stands still when it is told to end; set before it is deleted
	hung              chan struct{} // closed when it does
	killed            atomic.Bool   // without notice

	// Guarded by kubernetes.mu.
	ready   bool // as its probe has it
	since   time.Time
	leaving bool
}

// lapse is a moment in which a pod said that it was ready and did not decide what it was asked.
type lapse struct {
	pod       *pod
	at        int64
	undecided int
}

// propagation is how long it takes until all who forward requests, and the DNS, have heard of a change.
const propagation = time.Second

// namespaceName is the Kubernetes namespace of the rehearsal.
const namespaceName = "weir"

// newKubernetes reads the manifests and makes an empty cluster, whose DNS keeps answers for so long. Its containers'
// variables are those of the manifest, and more.
func newKubernetes(t *testing.T, ttl time.Duration, more ...variable) *kubernetes {
	t.Helper()
	for _, tool := range []string{"unshare", "setpriv", "mount", "env", "sh"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skipf("no %s on this machine: install util-linux to see Kubernetes rehearsed", tool)
		}
	}
	k := &kubernetes{
		t: t, fleet: emptyFleet(t, newNetwork(t, 0)), pods: make(map[int]*pod), probes: keyOfEach("probe"),
	}
	binary(t) // so that building it is not taken for time that nodes take
	k.prober = &http.Client{Transport: &http.Transport{DialContext: k.fleet.dial, DisableKeepAlives: true}}
	k.set, k.config = manifest[statefulSet](t, "statefulset.yaml"), manifest[configMap](t, "policies.yaml")
	k.budget = manifest[disruptionBudget](t, "poddisruptionbudget.yaml").Spec.MaxUnavailable
	k.replicas = k.set.Spec.Replicas
	k.node = k.set.Spec.Template.Spec.Containers[0]
	k.node.Env = append(openToCallers(k.node.Env), more...)
	k.secret = nodeSecrets(t)
	must.True(t, k.set.Spec.PodManagementPolicy == "Parallel" && k.budget != 0,
		"the manifests ask for what is not rehearsed here: %s, maxUnavailable %d", k.set.Spec.PodManagementPolicy,
		k.budget)
	must.True(t, k.port("http") == fleetHTTP && k.port("grpc") == fleetGRPC,
		"the manifests open %v, the tests ask at %s and %s", k.node.Ports, fleetHTTP, fleetGRPC)
	k.names = serveNames(t, k.fleet.network, k.set.Spec.ServiceName+"."+namespaceName+"."+clusterDomain, ttl)
	t.Cleanup(k.work.Wait)
	return k
}

// openToCallers takes out of a container's variables what callers have to prove: the load asks in plain text. Between
// nodes all is as in the manifest.
func openToCallers(env []variable) []variable {
	env = slices.DeleteFunc(slices.Clone(env), func(v variable) bool {
		return strings.HasPrefix(v.Value, secretsMount+"callers/") || strings.HasPrefix(v.Value, secretsMount+"access/")
	})
	return append(env, variable{Name: "WEIR_INSECURE", Value: "true"})
}

// secretsMount is where the manifest mounts Secrets.
const secretsMount = "/run/secrets/"

// nodeSecrets has the command make what nodes prove to each other.
func nodeSecrets(t *testing.T) map[string][]byte {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "secrets")
	out, err := exec.Command(binary(t), "secrets", dir).CombinedOutput()
	must.True(t, err == nil, "weir secrets: %v\n%s", err, out)
	files := make(map[string][]byte)
	for mount, secret := range map[string]string{"nodes": "weir-nodes-tls", "cluster": "weir-cluster"} {
		for _, e := range must.Value(os.ReadDir(filepath.Join(dir, secret)))(t) {
			files[mount+"/"+e.Name()] = must.Value(os.ReadFile(filepath.Join(dir, secret, e.Name())))(t)
		}
	}
	return files
}

// port is the number of a container's port, given by its name.
func (k *kubernetes) port(name string) string {
	for _, p := range k.node.Ports {
		if p.Name == name {
			return strconv.Itoa(p.ContainerPort)
		}
	}
	return name
}

// await is eventually, with the StatefulSet's controller at work.
func (k *kubernetes) await(within time.Duration, what string, holds func() bool) time.Duration {
	k.t.Helper()
	return eventually(k.t, within, what, func() bool {
		k.reconcile()
		return holds()
	})
}

// reconcile takes the next steps towards what the StatefulSet is to be, as its controller does with parallel pod
// management: pods that are missing or too many come and go at once, updates replace one at a time, from the highest
// ordinal down, and wait for each to be available.
func (k *kubernetes) reconcile() {
	k.t.Helper()
	pods := k.present()
	for ordinal, p := range pods {
		if ordinal >= k.replicas {
			k.delete(p)
		}
	}
	for ordinal := range k.replicas {
		if pods[ordinal] == nil {
			k.create(ordinal)
		}
	}
	pods = k.present()
	for ordinal := k.replicas - 1; ordinal >= 0; ordinal-- {
		p := pods[ordinal]
		if p == nil {
			return // gone just now: the next turn makes another
		}
		if p.revision != k.revision {
			k.delete(p)
			return
		}
		if !k.available(p) {
			return
		}
	}
}

// present returns the pods that are not gone, and forgets those that are.
func (k *kubernetes) present() map[int]*pod {
	k.mu.Lock()
	defer k.mu.Unlock()
	maps.DeleteFunc(k.pods, func(_ int, p *pod) bool {
		select {
		case <-p.gone:
			return true
		default:
			return false
		}
	})
	return maps.Clone(k.pods)
}

// create makes a pod, with an address that none has had before.
func (k *kubernetes) create(ordinal int) {
	k.t.Helper()
	k.addresses++
	network := k.fleet.network
	p := &pod{
		ordinal: ordinal, revision: k.revision, host: network.attach(k.addresses), started: time.Now(),
		deleted: make(chan struct{}), gone: make(chan struct{}), hung: make(chan struct{}),
		member: &member{name: k.set.Metadata.Name + "-" + strconv.Itoa(ordinal),
			ip: network.subnet + strconv.Itoa(k.addresses)},
	}
	k.fleet.reach(p.member)
	arguments := k.container(p)
	k.fleet.run(p.member, arguments[0], arguments[1:]...)
	k.change(func() { k.pods[ordinal] = p })
	k.work.Go(func() { k.kubelet(p) })
	k.work.Go(func() { k.watch(p) })
}

// container prepares what a container's process finds around it, and returns its command line.
func (k *kubernetes) container(p *pod) []string {
	k.t.Helper()
	etc := k.t.TempDir()
	write := func(path, content string) {
		path = filepath.Join(etc, path)
		must.NoError(k.t, errors.Join(os.MkdirAll(filepath.Dir(path), 0o755),
			os.WriteFile(path, []byte(content), 0o644)))
	}
	write("hosts", fmt.Sprintf("127.0.0.1 localhost\n%s %s.%s %s\n", p.ip, p.name,
		strings.TrimSuffix(k.names.service, "."), p.name))
	write("hostname", p.name+"\n")
	write("resolv.conf", fmt.Sprintf("nameserver %s\nsearch %s.%[3]s %[3]s cluster.local\noptions ndots:5\n",
		k.fleet.network.hubAddress(), namespaceName, strings.TrimSuffix(clusterDomain, ".")))
	env := make(map[string]string)
	for _, e := range k.node.Env {
		env[e.Name] = e.Value
		if file, ok := strings.CutPrefix(e.Value, secretsMount); ok {
			env[e.Name] = "/etc/secrets/" + file
		}
		if field := e.ValueFrom.FieldRef.FieldPath; field != "" {
			env[e.Name] = map[string]string{"metadata.name": p.name, "status.podIP": p.ip}[field]
		}
	}
	dir, ok := strings.CutPrefix(k.node.VolumeMounts[0].MountPath, "/etc/")
	must.True(k.t, ok && len(k.config.Data) == 1, "the policies are at %s of %v: a pod has one file in /etc here",
		k.node.VolumeMounts[0].MountPath, k.config.Data)
	for file := range k.config.Data {
		write(filepath.Join(dir, file), policyFile())
	}
	for file, content := range k.secret {
		write(filepath.Join("secrets", file), string(content))
	}
	must.NoError(k.t, os.Chmod(etc, 0o755))
	user := k.set.Spec.Template.Spec.SecurityContext
	line := []string{
		"setpriv", fmt.Sprintf("--reuid=%d", user.RunAsUser), fmt.Sprintf("--regid=%d", user.RunAsGroup),
		"--clear-groups",
		"--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "env", "-i", environment()[0],
	}
	for _, name := range slices.Sorted(maps.Keys(env)) {
		line = append(line, name+"="+env[name])
	}
	p.wrapper = slices.Concat(p.host.enter(),
		[]string{"unshare", "--mount", "sh", "-c", `mount --bind "$0" /etc && exec "$@"`, etc}, line)
	arguments := []string{binary(k.t)}
	for _, a := range k.node.Args {
		arguments = append(arguments,
			reference.ReplaceAllStringFunc(a, func(s string) string { return env[reference.FindStringSubmatch(s)[1]] }))
	}
	return arguments
}

// reference is how arguments mention variables.
var reference = regexp.MustCompile(`\$\(([^)]*)\)`)

// streak is how a probe has come out lately, and what that makes of the pod: one success is enough, and several
// failures are one.
type streak struct {
	probe  *probe
	passed bool // last
	length int
	holds  bool
}

// add takes in one more result.
func (s *streak) add(passed bool) {
	if passed != s.passed {
		s.passed, s.length = passed, 0
	}
	s.length++
	if passed || s.length >= s.probe.FailureThreshold {
		s.holds = passed
	}
}

// fatal reports whether a kubelet would restart the container for it.
func (s *streak) fatal() bool { return !s.passed && s.length >= s.probe.FailureThreshold }

func (s *streak) ticker() *time.Ticker {
	return time.NewTicker(time.Duration(s.probe.PeriodSeconds) * time.Second)
}

// ask carries out a probe. Without an answer in time it has failed.
func (k *kubernetes) ask(p *pod, s *streak) {
	ctx, cancel := context.WithTimeout(k.t.Context(), time.Duration(max(s.probe.TimeoutSeconds, 1))*time.Second)
	defer cancel()
	s.add(k.answers(ctx, p, k.port(s.probe.HTTPGet.Port), s.probe.HTTPGet.Path))
}

func (k *kubernetes) answers(ctx context.Context, p *pod, port, path string) bool {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+net.JoinHostPort(p.ip, port)+path, nil)
	if err != nil {
		return false
	}
	response, err := k.prober.Do(request)
	if err != nil {
		return false
	}
	response.Body.Close()
	return response.StatusCode >= 200 && response.StatusCode < 400
}

// kubelet looks after a pod until it is gone.
func (k *kubernetes) kubelet(p *pod) {
	defer func() {
		p.host.close()
		close(p.gone)
		k.change(func() {})
	}()
	k.keep(p)
	k.end(p)
}

// keep probes a pod until it is to go.
func (k *kubernetes) keep(p *pod) {
	startup, liveness, readiness := &streak{probe: &k.node.StartupProbe}, &streak{probe: &k.node.LivenessProbe},
		&streak{probe: &k.node.ReadinessProbe}
	start, live, ready := startup.ticker(), liveness.ticker(), readiness.ticker()
	defer start.Stop()
	defer live.Stop()
	defer ready.Stop()
	for {
		var now *streak
		select {
		case <-p.deleted:
			return
		case <-p.done:
			expect.True(k.t, p.killed.Load() || k.t.Context().Err() != nil, "%s has ended by itself: %v", p.name,
				p.cmd.ProcessState)
			return
		case <-k.t.Context().Done():
			return
		case <-start.C:
			now = startup
		case <-live.C:
			now = liveness
		case <-ready.C:
			now = readiness
		}
		if (now == startup) == startup.holds {
			continue // the others only count once it has started
		}
		k.ask(p, now)
		switch {
		case now == readiness && readiness.holds != p.ready:
			k.change(func() { p.ready, p.since = readiness.holds, time.Now() })
		case now == startup && startup.holds:
			start.Stop()
		case now != readiness && now.fatal():
			select {
			case <-p.done: // which the next turn finds
			default:
				k.t.Errorf("%s would be restarted: %s has failed %d times", p.name, now.probe.HTTPGet.Path, now.length)
				return
			}
		}
	}
}

// end ends a pod's process: in good order when it is to be deleted, and one that has ended by itself as it is.
func (k *kubernetes) end(p *pod) {
	grace := time.NewTimer(time.Duration(k.set.Spec.Template.Spec.TerminationGracePeriodSeconds) * time.Second)
	defer grace.Stop()
	select {
	case <-time.After(time.Duration(k.node.Lifecycle.PreStop.Sleep.Seconds) * time.Second):
	case <-p.done:
	case <-k.t.Context().Done():
		return
	}
	if p.hangs {
		_ = p.cmd.Process.Signal(syscall.SIGSTOP) // it runs: it is this function that ends it
		close(p.hung)
	}
	told := time.Now()
	_ = p.cmd.Process.Signal(syscall.SIGTERM) // it may have ended
	select {
	case <-p.done:
		if !p.killed.Load() && k.t.Context().Err() == nil {
			k.t.Logf("%s ended %v after SIGTERM", p.name, time.Since(told).Round(10*time.Millisecond))
		}
		if code := p.cmd.ProcessState.ExitCode(); code != 0 && !p.killed.Load() && k.t.Context().Err() == nil {
			k.t.Errorf("%s: exit status %d, want 0", p.name, code)
		}
	case <-grace.C:
		expect.True(k.t, p.hangs, "%s has not ended within its grace time", p.name)
		_ = p.cmd.Process.Kill()
		<-p.done
	case <-k.t.Context().Done():
	}
}

// delete has a pod end in good order.
func (k *kubernetes) delete(p *pod) {
	p.once.Do(func() {
		k.change(func() { p.leaving = true })
		close(p.deleted)
	})
}

// kill ends a pod without notice, and returns when that was.
func (k *kubernetes) kill(p *pod) int64 {
	k.t.Helper()
	p.killed.Store(true)
	p.member.kill()
	at := k.load.now()
	k.delete(p)
	return at
}

// evict is what draining a machine asks for each of its pods. It reports whether the PodDisruptionBudget lets it
// happen: a pod that is not ready counts as disrupted.
func (k *kubernetes) evict(p *pod) bool {
	k.t.Helper()
	if k.unready() >= k.budget {
		return false
	}
	k.delete(p)
	return true
}

// change does something to what others hear of, and has them hear of it after a while.
func (k *kubernetes) change(do func()) {
	k.mu.Lock()
	defer k.mu.Unlock()
	do()
	k.absent = max(k.absent, k.unreadyLocked())
	addresses := make(map[string]netip.Addr)
	var callable []*member
	for _, p := range k.pods {
		select {
		case <-p.gone:
			continue
		default:
		}
		addresses[p.name] = netip.MustParseAddr(p.ip) // whether or not it is ready: publishNotReadyAddresses
		if p.ready && !p.leaving {
			callable = append(callable, p.member)
		}
	}
	k.changes++
	number := k.changes
	k.work.Go(func() {
		select {
		case <-time.After(propagation):
		case <-k.t.Context().Done():
			return
		}
		k.mu.Lock()
		defer k.mu.Unlock()
		if number < k.told {
			return
		}
		k.told, k.callable = number, callable
		k.names.publish(addresses)
		if k.load != nil {
			k.load.ask(callable...)
		}
	})
}

// unready tells how many pods are not ready, or missing.
func (k *kubernetes) unready() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.unreadyLocked()
}

func (k *kubernetes) unreadyLocked() int {
	n := k.replicas
	for _, p := range k.pods {
		if p.ready && !p.leaving && p.ordinal < k.replicas {
			n--
		}
	}
	return n
}

// available reports whether a pod has been ready for minReadySeconds.
func (k *kubernetes) available(p *pod) bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return p.ready && !p.leaving && time.Since(p.since) >= time.Duration(k.set.Spec.MinReadySeconds)*time.Second
}

// members returns the pods' members, lowest ordinal first.
func (k *kubernetes) members() (all []*member) {
	pods := k.present()
	for _, ordinal := range slices.Sorted(maps.Keys(pods)) {
		all = append(all, pods[ordinal].member)
	}
	return all
}

// watch asks a pod, as long as it says that it is ready, about keys of all partitions, one after another.
func (k *kubernetes) watch(p *pod) {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	seen := false // that it says so
	batches := slices.Collect(slices.Chunk(k.probes, probeBatch()))
	for i := 0; ; i++ {
		select {
		case <-tick.C:
		case <-p.gone:
			return
		case <-k.t.Context().Done():
			return
		}
		if !k.saysReady(p) {
			continue
		}
		if !seen {
			seen = true
			k.t.Logf("%s says that it is ready %v after its start", p.name,
				time.Since(p.started).Round(10*time.Millisecond))
			expect.Equal(k.t, k.lacks(p), "", "%s says that it is ready, though", p.name)
		}
		began := time.Now()
		undecided := p.undecided("probe", batches[i%len(batches)])
		k.mu.Lock()
		load := k.load
		k.mu.Unlock()
		if len(undecided) > 0 && load != nil && k.saysReady(p) {
			k.mu.Lock()
			k.lapses = append(k.lapses, lapse{p, int64(began.Sub(load.start)), len(undecided)})
			k.mu.Unlock()
		}
	}
}

// probeBatch is how many keys a pod is asked about ten times a second.
func probeBatch() int {
	if raceEnabled {
		return 8
	}
	return 128
}

// lacks says what a pod has not got of what it is to hold. While others come or go nobody can tell.
func (k *kubernetes) lacks(p *pod) string {
	st, err := p.overview()
	if err != nil {
		return err.Error()
	}
	k.mu.Lock()
	replicas := k.replicas
	k.mu.Unlock()
	if len(st.Members) != replicas {
		return ""
	}
	lacks := ""
	for _, m := range st.Members {
		if m.State != "active" {
			return ""
		}
		if o := m.Ownership; m.Name == p.name && (o.Held < m.Partitions || o.Awaited > 0) {
			lacks = fmt.Sprintf("it is to have %d partitions and has %+v", m.Partitions, o)
		}
	}
	return lacks
}

// address asks the DNS, from outside the pods, for a pod's address: none where there is no such name.
func (k *kubernetes) address(pod string) (netip.Addr, error) {
	ctx, cancel := context.WithTimeout(k.t.Context(), 5*time.Second)
	defer cancel()
	resolver := &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		return k.fleet.network.dial(ctx, network, k.fleet.network.hubAddress()+":53")
	}}
	found, err := resolver.LookupNetIP(ctx, "ip4", pod+"."+k.names.service)
	if no := new(net.DNSError); errors.As(err, &no) && no.IsNotFound {
		return netip.Addr{}, nil
	}
	if err != nil || len(found) != 1 {
		return netip.Addr{}, fmt.Errorf("%s: %v, %w", pod, found, err)
	}
	return found[0], nil
}

// awaitNames waits until every pod that is to be there is found by its name, and no others.
func (k *kubernetes) awaitNames() {
	k.t.Helper()
	pods := k.present()
	for ordinal := range k.addresses { // there have never been more
		name, want := k.set.Metadata.Name+"-"+strconv.Itoa(ordinal), netip.Addr{}
		if p := pods[ordinal]; p != nil {
			want = netip.MustParseAddr(p.ip)
		}
		k.await(2*k.names.ttl+waitTimeout, fmt.Sprintf("the DNS says %v for %s", want, name), func() bool {
			found, err := k.address(name)
			return err == nil && found == want
		})
	}
}

func (k *kubernetes) saysReady(p *pod) bool {
	ctx, cancel := context.WithTimeout(k.t.Context(), 2*time.Second)
	defer cancel()
	return k.answers(ctx, p, fleetHTTP, "/readyz")
}
