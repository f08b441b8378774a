package cluster

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"io"

	"github.com/hashicorp/go-msgpack/v2/codec"
	"github.com/hashicorp/memberlist"
)

// The parts of memberlist's wire format (v0.7.0, net.go and security.go) that tell what comes in.
const (
	typePing         = 0
	typeAck          = 2
	typeDead         = 5
	typePushPull     = 6
	typeCompound     = 7
	typeEncrypted    = 10
	typeNack         = 11
	typeChecksummed  = 12
	typeError        = 13
	sealVersion      = 1 // AES-GCM; version 0 pads, and the library ends the process when the padding is wrong
	sealNonce        = 12
	sealTag          = 16
	minSealed        = 1 + sealNonce + sealTag + 1 // with one byte in it: the library takes the first without looking
	streamHeader     = 5                           // type, and length of what is encrypted
	checksumHeader   = 5
	maxListHeader    = 128 // bytes; it has three small fields
	maxUnseenMembers = 64  // that a list may have beyond twice those that there may be
)

// screen looks at what comes in before the library does, which trusts it: it takes lengths at their word, reads 20 MiB
// before it looks whether they can be decrypted, and ends the process on some of what a holder of the key can encrypt.
// What is let in is what nodes send, no longer than that can be; and nodes do not compress.
type screen struct {
	keyring *memberlist.Keyring // nil: plain text
	members int                 // that there may be
}

// packet returns why a packet is not let in, one of the reasons of Config.Rejected; nothing when it is.
func (s screen) packet(b []byte) (reason string) {
	if len(b) > maxPacket {
		return Malformed
	}
	if s.keyring != nil {
		plain, ok := s.open(b, nil)
		if !ok {
			return OtherKey
		}
		b = plain
	}
	if len(b) > checksumHeader && b[0] == typeChecksummed {
		b = b[checksumHeader:]
	}
	if !isPacket(b) {
		return Malformed
	}
	return ""
}

// isPacket reports whether b is a message that nodes send in packets, or some of them together.
func isPacket(b []byte) bool {
	if len(b) == 0 {
		return false
	}
	if b[0] != typeCompound {
		return b[0] <= typeDead || b[0] == typeNack
	}
	if len(b) < 2 {
		return false
	}
	lengths, parts := b[2:], int(b[1])
	if len(lengths) < 2*parts {
		return false
	}
	rest := lengths[2*parts:]
	for i := range parts {
		n := int(binary.BigEndian.Uint16(lengths[2*i:]))
		if n == 0 || n > len(rest) || rest[0] == typeCompound || !isPacket(rest[:n]) {
			return false
		}
		rest = rest[n:]
	}
	return true
}

// stream reads what a connection begins with: a list of members, or a kind of message that other allows. It returns
// what the library is to read of it; or nil, and why it is not let in when there is something to say about that. What
// the library itself answers, because one side encrypts and the other cannot read it, is left to it.
func (s screen) stream(conn io.Reader, other func(kind byte) bool) (rest io.Reader, reason string) {
	limit := maxList(s.members)
	bounded := io.LimitReader(conn, int64(limit))
	head := make([]byte, 1, streamHeader)
	if _, err := io.ReadFull(bounded, head); err != nil {
		return nil, "" // a port scan
	}
	switch encrypted := head[0] == typeEncrypted; {
	case s.keyring == nil && encrypted, s.keyring != nil && !encrypted:
		return bytes.NewReader(head), ""
	case !encrypted:
		var seen bytes.Buffer
		if !s.isBeginning(head[0], other, io.TeeReader(bounded, &seen)) {
			return nil, Malformed
		}
		return io.MultiReader(bytes.NewReader(head), &seen, bounded), ""
	}
	head = head[:streamHeader]
	if _, err := io.ReadFull(bounded, head[1:]); err != nil {
		return nil, Malformed
	}
	length := binary.BigEndian.Uint32(head[1:])
	if length < minSealed || int64(length) > int64(limit-streamHeader) {
		return nil, Malformed
	}
	all := bytes.NewBuffer(head) // grows as bytes come in
	if _, err := io.CopyN(all, bounded, int64(length)); err != nil {
		return nil, Malformed
	}
	sealed := all.Bytes()
	if plain, ok := s.open(sealed[streamHeader:], sealed[:streamHeader]); ok {
		if !s.isBeginning(plain[0], other, bytes.NewReader(plain[1:])) {
			return nil, Malformed
		}
	} else if sealed[streamHeader] != sealVersion {
		return nil, Malformed
	}
	return bytes.NewReader(sealed), ""
}

// isAsked and isAnswer report whether a kind of message comes on a connection of another node, and back on one to it.
func isAsked(kind byte) bool  { return kind == typePing }
func isAnswer(kind byte) bool { return kind == typeAck || kind == typeError }

// isBeginning reports whether a stream begins with what nodes send. It reads no further than needed to tell.
func (s screen) isBeginning(kind byte, other func(kind byte) bool, r io.Reader) bool {
	if kind != typePushPull {
		return other(kind)
	}
	var header struct {
		Nodes        int
		UserStateLen int
		Join         bool
	}
	err := codec.NewDecoder(io.LimitReader(r, maxListHeader), &codec.MsgpackHandle{}).Decode(&header)
	return err == nil && header.Nodes >= 0 && header.Nodes <= 2*s.members+maxUnseenMembers && header.UserStateLen == 0
}

// open decrypts and authenticates what is sealed, with any key of the ring. It returns false when that cannot be done,
// or nothing is in it.
func (s screen) open(sealed, additional []byte) (plain []byte, ok bool) {
	if len(sealed) < minSealed || sealed[0] != sealVersion {
		return nil, false
	}
	for _, key := range s.keyring.GetKeys() {
		block, err := aes.NewCipher(key)
		if err != nil {
			continue
		}
		gcm, err := cipher.NewGCM(block)
		if err != nil {
			continue
		}
		plain, err := gcm.Open(nil, sealed[1:1+sealNonce], sealed[1+sealNonce:], additional)
		if err == nil {
			return plain, true
		}
	}
	return nil, false
}
