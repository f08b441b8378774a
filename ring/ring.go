// Package ring says which member of a cluster should own a key: the key's hash picks one of a fixed number of
// partitions, and an immutable table gives every partition to a member by consistent hashing with bounded loads.
//
// The same set of members gives the same table in every process that is built with the same settings, in whatever
// order the members became known. Nothing here knows who is alive, who has agreed to what, or who holds a
// partition's state at this moment: two processes with different views of the membership have different tables, and
// the table promises nothing about that. Names, not addresses, place a member.
package ring

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"

	"github.com/buraksezer/consistent"
	"github.com/cespare/xxhash/v2"
)

// The settings of the ring. All nodes of a cluster must have the same; SettingsFingerprint tells them apart.
//
// Measured, and held to by TestMovement, at 3 to 100 members: a join or leave moves the partitions of the member that
// comes or goes and, depending on the names, 0 to 0.8 % of all others (0.1 % on the mean). The library's defaults (271
// partitions, 20 virtual nodes) leave members empty at 100.
const (
	Partitions   = 4093 // prime
	VirtualNodes = 100  // of each member
	Load         = 1.25 // no member owns more than this times the average, rounded up
)

// placement names what decides the table and the partitions of keys besides the settings: the library, whose v1.0.0 names its virtual
// nodes "index:name" where v0.10 had "nameindex", the hash of those names, which no caller chooses, and that of keys.
const placement = "weir ring 2; consistent v1.0.0; xxhash64; keys siphash-2-4 under siphash-2-4-128 of the scope"

// Hash places a key of a scope: k.Scope(scope).Hash(key). Who hashes many keys of one scope keeps the Scope.
func Hash(k HashKey, scope, key string) uint64 { return k.Scope(scope).Hash(key) }

// Partition returns the partition of a Hash, 0 to Partitions-1.
func Partition(hash uint64) int { return int(hash % Partitions) }

// SettingsFingerprint stands for everything that must be the same on all nodes for their tables and their keys'
// partitions to agree: in its upper half the settings above and the way of placing, in its lower half the hash key. It can
// be shown to others: the 32 bits of it that depend on the key are of a SHA-256 sum, and tell who has them whether a guess of all
// 128 bits, or of the secret that they come from, may be right.
func SettingsFingerprint(k HashKey) uint64 {
	settings := sha256.Sum256(appendSettings(nil))
	ofKey := sha256.Sum256(append([]byte("weir hash key fingerprint"), k.Bytes()...))
	return uint64(binary.LittleEndian.Uint32(settings[:]))<<32 | uint64(binary.LittleEndian.Uint32(ofKey[:]))
}

// Difference says what two SettingsFingerprints differ in, in words for an operator; nothing when they are equal.
func Difference(a, b uint64) string {
	switch {
	case a == b:
		return ""
	case a>>32 == b>>32:
		return "another cluster secret"
	case uint32(a) == uint32(b):
		return "other ring settings"
	}
	return "other ring settings and another cluster secret"
}

func appendSettings(b []byte) []byte {
	b = append(b, placement...)
	b = binary.LittleEndian.AppendUint64(b, Partitions)
	b = binary.LittleEndian.AppendUint64(b, VirtualNodes)
	return binary.LittleEndian.AppendUint64(b, math.Float64bits(Load))
}

// Table gives every partition an owner. It is immutable and safe for concurrent use.
type Table struct {
	members     []string
	owners      []int32 // by partition: index into members; nil when there are none
	fingerprint uint64
}

// Build makes the table of a set of members, given in any order; a name given twice counts once. Without members the
// table has no owners. It costs about 1 ms for 10 members and 50 ms for 100.
func Build(members []string) *Table {
	t := &Table{members: slices.Clone(members)}
	// The library depends on the order when two virtual nodes have one hash, and New takes a name given twice for two.
	slices.Sort(t.members)
	t.members = slices.Compact(t.members)
	if len(t.members) > 0 {
		t.owners = place(t.members)
	}
	t.fingerprint = fingerprint(t.members, t.owners)
	return t
}

// place copies the library's table out, because its look-ups take a lock and a map.
func place(members []string) []int32 {
	nodes := make([]consistent.Member, len(members))
	for i, name := range members {
		nodes[i] = node{name: name, index: int32(i)}
	}
	c := consistent.New(nodes, consistent.Config{
		Hasher:            hasher{},
		PartitionCount:    Partitions,
		ReplicationFactor: VirtualNodes,
		Load:              Load,
	})
	owners := make([]int32, Partitions)
	for p := range owners {
		owners[p] = c.GetPartitionOwner(p).(node).index
	}
	return owners
}

// node is a member as the library sees it.
type node struct {
	name  string
	index int32
}

func (n node) String() string { return n.name }

type hasher struct{}

func (hasher) Sum64(b []byte) uint64 { return xxhash.Sum64(b) }

func fingerprint(members []string, owners []int32) uint64 {
	b := appendSettings(nil)
	for _, m := range members {
		b = binary.LittleEndian.AppendUint64(b, uint64(len(m)))
		b = append(b, m...)
	}
	for _, o := range owners {
		b = binary.LittleEndian.AppendUint32(b, uint32(o))
	}
	sum := sha256.Sum256(b)
	return binary.LittleEndian.Uint64(sum[:])
}

// Members returns the names of the members, sorted. The caller must not change the slice.
func (t *Table) Members() []string { return t.members }

// Owner returns the owner of a partition as an index into Members, or -1 when the table has no members. It panics for
// a partition outside 0 to Partitions-1.
func (t *Table) Owner(partition int) int {
	if t.owners == nil {
		return -1
	}
	return int(t.owners[partition])
}

// Fingerprint is the same for two tables if and only if (but for chance) settings, members and owners are.
func (t *Table) Fingerprint() uint64 { return t.fingerprint }

// Without returns the table of the same members but one; t itself when there is no such member.
//
// It is also the rule for backups: the backup of a partition is its owner in the table without its present owner, and
// therefore, after a crash of that owner, always the next one. (The library's GetClosestN walks another ring and
// nearly never names the next owner.) Copies are bounded by no more than that, and need not be: a member that is full in both tables
// gets few, so that what it owns and what it has copies of together are more even than either (held to by TestCopies: at 20
// members with usual names at most 1.26 times the mean, at 50 at most 1.34). A bound of 1.25 on copies as well would move none of 4093
// in most clusters, and change nothing of that; one of 1.1 would take off a twentieth, but up to 132 partitions would have their
// copy where it is not wanted after a crash and be moved once more, a leave would move up to 66 copies needlessly, and every
// member would have to build the tables of all. A node needs backups for what it owns only, which is one call with its own name,
// at the price of a Build.
func (t *Table) Without(member string) *Table {
	i, found := slices.BinarySearch(t.members, member)
	if !found {
		return t
	}
	return Build(slices.Delete(slices.Clone(t.members), i, i+1))
}
