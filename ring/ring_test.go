package ring

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/weirlimit/weir/test/expect"
	"github.com/weirlimit/weir/test/must"
)

var testKey = HashKey{k0: 0x0706050403020100, k1: 0x0f0e0d0c0b0a0908}

func names(n int) []string {
	list := make([]string, n)
	for i := range list {
		list[i] = fmt.Sprintf("weir-%d", i)
	}
	return list
}

func ownerNames(t *Table) []string {
	list := make([]string, Partitions)
	for p := range list {
		list[p] = t.Members()[t.Owner(p)]
	}
	return list
}

func TestSameSetSameTable(t *testing.T) {
	random := rand.New(rand.NewPCG(1, 2))
	for _, n := range []int{1, 2, 3, 10, 20} {
		want := Build(names(n))
		for range 5 {
			list := append(names(n), "weir-0") // and one of them twice
			random.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
			given := slices.Clone(list)
			got := Build(list)
			must.True(t, slices.Equal(list, given), "Build changed its argument")
			must.True(t, slices.Equal(got.Members(), want.Members()) && slices.Equal(ownerNames(got), ownerNames(want)),
				"%d members: another order gave another table", n)
			must.Equal(t, got.Fingerprint(), want.Fingerprint(),
				"%d members: another order gave another fingerprint", n)
		}
	}
}

func TestBuildThroughChangesIsTheSame(t *testing.T) {
	// A table does not remember how its set came about.
	got := Build(append(names(7), "passing", "guest")).Without("guest").Without("passing").Without("never there")
	want := Build(names(7))
	must.Equal(t, got.Fingerprint(), want.Fingerprint(), "members that came and went left a trace")
}

func TestEmpty(t *testing.T) {
	for _, table := range []*Table{Build(nil), Build([]string{"a"}).Without("a")} {
		if len(table.Members()) != 0 {
			t.Errorf("members of an empty table: %q", table.Members())
		}
		for p := range Partitions {
			must.Equal(t, table.Owner(p), -1, "owner of %d in an empty table", p)
		}
	}
}

// Every partition has an owner, every member has partitions, and none more than the load allows.
func TestLoad(t *testing.T) {
	for _, n := range []int{1, 2, 3, 5, 10, 30, 100} {
		table := Build(names(n))
		load := make([]int, n)
		for p := range Partitions {
			load[table.Owner(p)]++ // panics when there is none
		}
		bound := int(math.Ceil(float64(Partitions) / float64(n) * Load))
		m := slices.Max(load)
		expect.True(t, m <= bound, "%d members: one owns %d partitions, more than %d", n, m, bound)
		expect.True(t, slices.Min(load) != 0, "%d members: one owns nothing", n)
	}
}

// A leave moves what the member owned and little else; a join is the same the other way round. (Over all members the
// mean of what moves is then the ideal share plus the mean of what moves needlessly; one member's own share may be a
// quarter off the ideal.)
func TestMovement(t *testing.T) {
	for _, prefix := range []string{"", "node"} {
		for _, n := range []int{3, 4, 5, 10, 20, 50, 100} {
			list := names(n)
			for i := range list {
				list[i] = prefix + list[i]
			}
			full := Build(list)
			was := ownerNames(full)
			leavers := list[:min(n, 10, max(1, 100/n))]
			total := 0
			for _, leaver := range leavers {
				needless := 0
				for p, owner := range ownerNames(full.Without(leaver)) {
					must.True(t, was[p] != leaver || owner != leaver, "%s still owns %d", leaver, p)
					if was[p] != leaver && owner != was[p] {
						needless++
					}
				}
				total += needless
				share := float64(needless) / Partitions
				expect.True(t, share <= 0.01,
					"%d members, %s leaves: %.2f %% of the partitions move between others", n, leaver, share*100)
			}
			if mean := float64(total) / float64(len(leavers)) / Partitions; mean > 0.005 {
				t.Errorf("%d members: a leave moves %.2f %% more than it must, on the mean", n, mean*100)
			}
		}
	}
}

// The backup of a partition is the one that owns it once its owner is gone.
func TestBackupIsTheNextOwner(t *testing.T) {
	for _, n := range []int{2, 3, 10} {
		table := Build(names(n))
		for _, gone := range table.Members() {
			backups := table.Without(gone)
			rest := slices.DeleteFunc(names(n), func(s string) bool { return s == gone })
			next := Build(rest)
			for p := range Partitions {
				if table.Members()[table.Owner(p)] != gone {
					continue
				}
				backup, owner := backups.Members()[backups.Owner(p)], next.Members()[next.Owner(p)]
				must.True(t, backup == owner && backup != gone,
					"%d members: partition %d of %s: backup %s, next owner %s", n, p, gone, backup, owner)
			}
		}
	}
}

// backups names the backup of every partition, as its owner sees it.
func backups(t *Table) []string {
	list := make([]string, Partitions)
	for i, owner := range t.Members() {
		next := t.Without(owner)
		for p := range list {
			if t.Owner(p) == i {
				list[p] = next.Members()[next.Owner(p)]
			}
		}
	}
	return list
}

// What fills a member's memory is what it owns and what it has copies of. Where owners are uneven, copies are so the
// other way round.
func TestCopies(t *testing.T) {
	for _, prefix := range []string{"", "node"} {
		for _, n := range []int{2, 3, 5, 10, 20, 50} {
			list := names(n)
			for i := range list {
				list[i] = prefix + list[i]
			}
			table := Build(list)
			owns, copies := make(map[string]int), make(map[string]int)
			for _, owner := range ownerNames(table) {
				owns[owner]++
			}
			was := backups(table)
			for _, backup := range was {
				copies[backup]++
			}
			mean := float64(Partitions) / float64(n)
			for _, name := range list {
				if both := float64(owns[name]+copies[name]) / (2 * mean); both > 1.4 || both < 0.6 {
					t.Errorf("%d members: %s owns %d partitions and has copies of %d; the mean is %.0f", n, name,
						owns[name], copies[name], mean)
				}
			}
			if n < 3 || n > 10 {
				continue
			}
			// A copy moves when its owner or its holder goes, and hardly any other does.
			gone, needless := list[n/2], 0
			left := table.Without(gone)
			now, owners, then := backups(left), ownerNames(left), ownerNames(table)
			for p := range now {
				if owners[p] == then[p] && was[p] != gone && now[p] != was[p] {
					needless++
				}
			}
			if share := float64(needless) / Partitions; share > 0.01 {
				t.Errorf("%d members, %s leaves: %.2f %% of the copies move between others", n, gone, share*100)
			}
		}
	}
}

// Another version of the library, or another hash, may place differently without a word: nodes of both builds would
// then disagree about owners. When this fails, change placement, so that such nodes refuse each other.
func TestPlacementIsPinned(t *testing.T) {
	sum := sha256.Sum256([]byte(strings.Join(ownerNames(Build(names(5))), "\n")))
	got, want := hex.EncodeToString(sum[:8]), "8b4f4caa65019948"
	expect.True(t, got == want, "table of 5 members: %s, was %s", got, want)
	if got, want := Hash(testKey, "login", "alice"), uint64(0x6ad645507157c931); got != want {
		t.Errorf("Hash: %#x, was %#x", got, want)
	}
	if got, want := SettingsFingerprint(testKey), uint64(0x7294a5126dcfa799); got != want {
		t.Errorf("SettingsFingerprint: %#x, was %#x", got, want)
	}
}

func TestFingerprintsDiffer(t *testing.T) {
	seen := map[uint64]string{}
	for _, members := range [][]string{nil, {"a"}, {"b"}, {"ab"}, {"a", "b"}, {"a", "b", "c"}, {"ab", "c"},
		{"a", "bc"}} {
		f := Build(members).Fingerprint()
		other, dup := seen[f]
		expect.True(t, !dup, "%q has the fingerprint of %s", members, other)
		seen[f] = fmt.Sprintf("%q", members)
	}
	here, other := SettingsFingerprint(HashKey{}), SettingsFingerprint(testKey)
	expect.True(t, here != other, "the hash key does not show in the settings' fingerprint")
	for there, want := range map[uint64]string{
		here: "", other: "another cluster secret", here ^ 1<<40: "other ring settings",
		here ^ 1 ^ 1<<40: "other ring settings and another cluster secret",
	} {
		expect.Equal(t, Difference(here, there), want, "%#x", there)
	}
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{3, 10, 100} {
		members := names(n)
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				Build(members)
			}
		})
	}
}

// What a node pays after a change of membership to know the backups of its own partitions.
func BenchmarkBackups(b *testing.B) {
	for _, n := range []int{3, 10, 100} {
		table := Build(names(n))
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			for b.Loop() {
				table.Without("weir-1")
			}
		})
	}
}
