package cluster

import (
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// protocol is the version of what nodes tell each other in gossip. Nodes of different versions reject each other.
const protocol = 3

// State is how far a member has come.
type State uint8

// The states of a member. The ring holds the active ones.
const (
	Joining State = 1 // has not claimed anything yet
	Active  State = 2
	Leaving State = 3 // still there, handing over
)

// String returns the state's name in lower case.
func (s State) String() string {
	switch s {
	case Joining:
		return "joining"
	case Active:
		return "active"
	case Leaving:
		return "leaving"
	}
	return fmt.Sprintf("State(%d)", uint8(s))
}

// established reports whether a member in this state has taken its place before.
func (s State) established() bool { return s == Active || s == Leaving }

// identity is a process: a ring name and the boot that tells its process starts apart.
type identity struct {
	name string
	boot uint64
}

// String returns the gossip name.
func (i identity) String() string { return fmt.Sprintf("%s/%016x", i.name, i.boot) }

func parseIdentity(gossipName string) (identity, error) {
	name, digits, found := strings.Cut(gossipName, "/")
	if !found || len(digits) != 16 || CheckName(name) != nil {
		return identity{}, fmt.Errorf("%q is not the gossip name of a weir node", gossipName)
	}
	boot, err := strconv.ParseUint(digits, 16, 64)
	if err != nil {
		return identity{}, fmt.Errorf("%q is not the gossip name of a weir node", gossipName)
	}
	return identity{name, boot}, nil
}

// metadata is what a node tells about itself along with its name and address.
type metadata struct {
	protocol uint8
	state    State
	settings uint64
	policy   uint32
	peer     uint16 // ports; 0: none
	http     uint16
	grpc     uint16
	voters   uint32 // fingerprint of the list; 0: none
	envoy    uint32 // see Cluster.SetEnvoyHash
}

// The layout is fixed length, big endian. Magic, protocol and state keep their place in every protocol version, so
// that a node which must reject another still sees whether that one is established. A later build of the same protocol
// may append fields.
const (
	metadataMagic = 0x5745 // "WE"
	headerLen     = 4
	metadataLen   = headerLen + 4 + 8 + 4 + 3*2 + 4 + 4
)

func (m metadata) encode() []byte {
	b := make([]byte, 0, metadataLen)
	b = binary.BigEndian.AppendUint16(b, metadataMagic)
	b = append(b, m.protocol, byte(m.state))
	b = binary.BigEndian.AppendUint32(b, 0) // unused; earlier builds have a number here
	b = binary.BigEndian.AppendUint64(b, m.settings)
	b = binary.BigEndian.AppendUint32(b, m.policy)
	b = binary.BigEndian.AppendUint16(b, m.peer)
	b = binary.BigEndian.AppendUint16(b, m.http)
	b = binary.BigEndian.AppendUint16(b, m.grpc)
	b = binary.BigEndian.AppendUint32(b, m.voters)
	return binary.BigEndian.AppendUint32(b, m.envoy)
}

// decodeMetadata reads what encode wrote. Of another protocol version it reads the header only.
func decodeMetadata(b []byte) (metadata, error) {
	if len(b) < headerLen || binary.BigEndian.Uint16(b) != metadataMagic {
		return metadata{}, errors.New("not the metadata of a weir node")
	}
	m := metadata{protocol: b[2], state: State(b[3])}
	if m.state < Joining || m.state > Leaving {
		return metadata{}, fmt.Errorf("metadata with unknown state %d", b[3])
	}
	if m.protocol != protocol {
		return m, nil
	}
	if len(b) < metadataLen {
		return metadata{}, fmt.Errorf("metadata of %d bytes, expected %d", len(b), metadataLen)
	}
	m.settings = binary.BigEndian.Uint64(b[8:])
	m.policy = binary.BigEndian.Uint32(b[16:])
	m.peer = binary.BigEndian.Uint16(b[20:])
	m.http = binary.BigEndian.Uint16(b[22:])
	m.grpc = binary.BigEndian.Uint16(b[24:])
	m.voters = binary.BigEndian.Uint32(b[26:])
	m.envoy = binary.BigEndian.Uint32(b[30:])
	return m, nil
}

// votersFingerprint stands for a list of voters in any order. No list is 0, and only that.
func votersFingerprint(names []string) uint32 {
	if len(names) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(names))
	sum := sha256.Sum256([]byte("weir voters\x00" + strings.Join(sorted, "\x00"))) // no name has a zero byte
	return binary.BigEndian.Uint32(sum[:]) | 1
}
