// Package ring says which member of a cluster should own a key. The key's hash selects one of a fixed number of
// partitions, and an immutable table (Table) gives each partition to a member by consistent hashing with bounded loads.
//
// The same members give the same table in every process with the same settings, in whatever order the members became
// known. The package does not know which members are alive, what nodes have agreed, or which node holds a partition's
// states now. Two processes with different views of the membership have different tables, and the package promises
// nothing about those. A member's place depends on its name and not on its address.
package ring

import (
	"crypto/sha256"
	"encoding/binary"
	"math"
	"slices"

	"github.com/buraksezer/consistent"
	"github.com/cespare/xxhash/v2"
)

// The settings of the ring. All nodes of a cluster must have the same ones; SettingsFingerprint shows a difference.
//
// Measured, and checked by TestMovement, at 3 to 100 members: a join or leave moves the partitions of that member and,
// depending on the names, 0 to 0.8 % of all others (0.1 % on average). With the library's defaults (271 partitions, 20
// virtual nodes) some of 100 members own nothing.
const (
	Partitions   = 4093 // prime
	VirtualNodes = 100  // of each member
	Load         = 1.25 // a member owns at most this times the average, rounded up
)

// placement names everything besides the settings that determines the table and the partitions of keys: the library
// (v1.0.0 names its virtual nodes "index:name", v0.10 "nameindex"), the hash of those names, which callers do not
// choose, and the hash of keys.
const placement = "weir ring 2; consistent v1.0.0; xxhash64; keys siphash-2-4 under siphash-2-4-128 of the scope"

// Hash returns the hash of a key in a scope: k.Scope(scope).Hash(key). Code that hashes many keys of one scope should
// keep the Scope.
func Hash(k HashKey, scope, key string) uint64 { return k.Scope(scope).Hash(key) }

// Partition returns the partition of a Hash, 0 to Partitions-1.
func Partition(hash uint64) int { return int(hash % Partitions) }

// SettingsFingerprint represents everything that must be the same on all nodes, so that their tables and their keys'
// partitions agree: the settings and placement in its upper half, the hash key in its lower half. It is not secret: its
// 32 bits of a SHA-256 sum of the hash key only help to check a guess of all 128 bits, or of the secret from which they
// are derived.
func SettingsFingerprint(k HashKey) uint64 {
	settings := sha256.Sum256(appendSettings(nil))
	ofKey := sha256.Sum256(append([]byte("weir hash key fingerprint"), k.Bytes()...))
	return uint64(binary.LittleEndian.Uint32(settings[:]))<<32 | uint64(binary.LittleEndian.Uint32(ofKey[:]))
}

// Difference describes the difference of two SettingsFingerprints to an operator; empty when they are equal.
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

// Table says which member owns each partition. It is immutable and safe for concurrent use.
type Table struct {
	members     []string
	owners      []int32 // index into members, by partition; nil without members
	fingerprint uint64
}

// Build returns the table of some members, given in any order; repeated names count once. Without members the table has
// no owners. It takes about 1 ms for 10 members and 50 ms for 100.
func Build(members []string) *Table {
	t := &Table{members: slices.Clone(members)}
	// The library's result depends on the order when two virtual nodes have the same hash, and it takes a repeated name
	// for two members.
	slices.Sort(t.members)
	t.members = slices.Compact(t.members)
	if len(t.members) > 0 {
		t.owners = place(t.members)
	}
	t.fingerprint = fingerprint(t.members, t.owners)
	return t
}

// place copies the owners from the library's table, whose look-ups take a lock and a map.
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

// node is a member, as the library needs it.
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

// Owner returns the owner of a partition as an index into Members, or -1 when the table has no members. It panics for a
// partition outside 0 to Partitions-1.
func (t *Table) Owner(partition int) int {
	if t.owners == nil {
		return -1
	}
	return int(t.owners[partition])
}

// Fingerprint returns a hash of settings, members and owners.
func (t *Table) Fingerprint() uint64 { return t.fingerprint }

// Without returns the table of all members but one; t itself when there is no such member. It takes as long as Build.
//
// The backup of a partition is its owner in the table without its present owner. After a crash of the owner the backup
// is therefore the next owner. (The library's GetClosestN uses another ring, and hardly ever returns the next owner.) A
// node needs the backups of its own partitions only, which is one call with its own name.
//
// Copies have no bound besides the tables' Load, and need none. A member with many partitions in both tables gets few
// copies, so that the sum of what it owns and copies is more even than either: with usual names at most 1.26 times the
// mean at 20 members and 1.34 at 50 (TestCopies). A bound of 1.25 on copies would move none in most clusters. A bound
// of 1.1 would take off a twentieth, but up to 132 of 4093 partitions would then have their copy at a member that is
// not the next owner, a leave would move up to 66 copies needlessly, and every member would have to build the tables of
// all.
func (t *Table) Without(member string) *Table {
	i, found := slices.BinarySearch(t.members, member)
	if !found {
		return t
	}
	return Build(slices.Delete(slices.Clone(t.members), i, i+1))
}
