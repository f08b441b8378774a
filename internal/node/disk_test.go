package node

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/weirlimit/weir/cluster"
	"github.com/weirlimit/weir/internal/disk"
	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
	"github.com/weirlimit/weir/test/testkit"
)

const persistentPolicy = "policies:\n  - {name: login, algorithm: sliding_log, limit: %d, window: 1h, durability: sync, persist: %v}\n"

func persistentConfig(t *testing.T, name string) Config {
	cfg := testConfig(t, name)
	cfg.PolicyFile = testkit.WriteFile(t, "policies.yaml", fmt.Sprintf(persistentPolicy, 5, true))
	cfg.GossipPort, cfg.PeerPort, cfg.DataDir = PortOff, PortOff, t.TempDir()
	return cfg
}

// TestCountersOnDisk: a node that has stopped goes on counting, and says in its log, status and metrics how it does so.
func TestCountersOnDisk(t *testing.T) {
	cfg := persistentConfig(t, "a")
	var log testkit.Buffer
	cfg.Logger = log.Logger()
	n := mustSettle(t, cfg)
	for range 3 {
		expect.True(t, check(t, n, "k").Allowed, "refused")
	}
	_, status := send(t, n, "GET", "/v1/status", "", "")
	expect.True(t, strings.Contains(status, `"disk":{"bytes":`), "%s", status)
	_, metrics := send(t, n, "GET", "/metrics", "", "")
	expect.True(t, strings.Contains(metrics, "weir_disk_failed 0") && strings.Contains(metrics, "weir_disk_bytes"), "no metrics of the disk")
	n.Stop()
	expect.True(t, strings.Contains(log.String(), "counters saved"), "%s", log.String())
	n = mustSettle(t, cfg)
	expect.Equal(t, check(t, n, "k").Remaining, int64(1))

	// Without persist the disk forgets the key, and with it again begins with what is counted then.
	reload := func(limit int, persist bool) {
		must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, persistentPolicy, limit, persist), 0o600))
		testkit.Eventually(t, "the file is read", func() bool { return n.Policies().Policies()[0].Limits[0].Limit == int64(limit) })
	}
	reload(6, false)
	expect.Equal(t, check(t, n, "k").Remaining, int64(1))
	reload(7, true)
	expect.Equal(t, check(t, n, "k").Remaining, int64(1))
	n.Stop()
	n = mustSettle(t, cfg)
	expect.Equal(t, check(t, n, "k").Remaining, int64(0))
	reload(8, false)
	expect.Equal(t, check(t, n, "k").Remaining, int64(0))
	n.Stop()
	must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, "%s  - {name: other, limits: [1/1h], persist: true}\n", fmt.Sprintf(persistentPolicy, 8, false)), 0o600))
	n = mustSettle(t, cfg)
	expect.Equal(t, check(t, n, "k").Remaining, int64(7), "what the disk was told to forget")
}

// TestPersistRefused: what keeps a persistent policy, or a node with one, from starting.
func TestPersistRefused(t *testing.T) {
	cfg := persistentConfig(t, "a")
	without := cfg
	without.DataDir = ""
	_, err := Start(t.Context(), without)
	expect.ErrorContains(t, err, cfg.PolicyFile+":2:92: policies[0].persist: true needs a data directory")
	without.KeepNothing = true
	n := mustSettle(t, without)
	expect.True(t, check(t, n, "k").Allowed, "refused")
	n.Stop()

	mustSettle(t, cfg).Stop()
	of := func(change func(*Config), want string) {
		t.Helper()
		other := cfg
		change(&other)
		_, err := Start(t.Context(), other)
		expect.ErrorContains(t, err, "data-dir: ")
		expect.ErrorContains(t, err, want)
	}
	of(func(c *Config) { c.Name = "b" }, "is of the node a, and this is b")
	of(func(c *Config) { c.GossipPort, c.PeerPort = PortAny, PortAny }, "of another cluster, or of another secret")
	of(func(c *Config) { c.MaxKeys = -1; c.MaxMemory = 1 << 16; overfill(t, cfg) }, "more memory than max-memory")
	manifests := must.Value(filepath.Glob(filepath.Join(cfg.DataDir, disk.Folder, "MANIFEST-*")))(t)
	must.True(t, len(manifests) > 0, "no manifest")
	for _, name := range manifests {
		must.NoError(t, os.WriteFile(name, []byte("not a manifest of an engine"), 0o600))
	}
	of(func(*Config) {}, disk.Folder)
}

// TestFirstPersist: the first persistent policy takes a restart, since the disk is opened at the start.
func TestFirstPersist(t *testing.T) {
	cfg := persistentConfig(t, "a")
	must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, persistentPolicy, 5, false), 0o600))
	n := mustSettle(t, cfg)
	must.NoError(t, os.WriteFile(cfg.PolicyFile, fmt.Appendf(nil, persistentPolicy, 6, true), 0o600))
	testkit.Eventually(t, "the file is rejected", func() bool { return n.policyError() != "" })
	expect.True(t, strings.Contains(n.policyError(), ":2:92: policies[0].persist: true is new, and takes a restart"), "%s", n.policyError())
}

// overfill has a node keep more than fits into very little memory.
func overfill(t *testing.T, cfg Config) {
	n := mustSettle(t, cfg)
	defer n.Stop()
	for i := range 2000 {
		check(t, n, strings.Repeat("k", 200)+fmt.Sprint(i))
	}
}

// TestToAwait: a node waits at its next start for members that it has lost, and for those that left while it left.
func TestToAwait(t *testing.T) {
	states := make(map[string]cluster.State)
	sees := func(want string, members ...cluster.Member) {
		t.Helper()
		v := &cluster.View{Members: members, Self: &members[0]}
		expect.Equal(t, strings.Join(toAwait(states, v), " "), want)
	}
	a, b, c, d := cluster.Member{Name: "a"}, cluster.Member{Name: "b"}, cluster.Member{Name: "c"}, cluster.Member{Name: "d"}
	a.State, b.State, c.State, d.State = cluster.Active, cluster.Active, cluster.Leaving, cluster.Active
	sees("a b c d", a, b, c, d)
	sees("a b d", a, b, d)
	sees("a b d", a, b)
	b.State = cluster.Leaving
	sees("a b d", a, b)
	a.State = cluster.Leaving
	sees("a b d", a)
}
